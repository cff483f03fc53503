"""Signatures of callbacks, as https://www.standardwebhooks.com has them, so that their libraries check ours. Pure."""

import base64
import hmac
from typing import Final

_PREFIX: Final = "whsec_"


def secret_text(secret: bytes) -> str:
    """A tenant's secret as it is shown to it."""
    return _PREFIX + base64.b64encode(secret).decode()


def headers_of(secret: bytes, message_id: str, unix_s: int, body: bytes) -> dict[str, str]:
    """The three headers of a message."""
    signed = b"%b.%d.%b" % (message_id.encode(), unix_s, body)
    signature = base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()
    return {"webhook-id": message_id, "webhook-timestamp": str(unix_s), "webhook-signature": f"v1,{signature}"}


def purpose_of(tenant: str) -> str:
    """What `Runtime.derive_secret` is asked for."""
    return f"callback/{tenant}"
