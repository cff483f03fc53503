"""Signatures of callbacks, as https://www.standardwebhooks.com has them, so that their libraries check ours. Pure."""

import base64
import hmac
from collections.abc import Iterable
from typing import Final

_PREFIX: Final = "whsec_"


def secret_text(secret: bytes) -> str:
    """A tenant's secret as it is shown to it."""
    return _PREFIX + base64.b64encode(secret).decode()


def headers_of(secrets: Iterable[bytes], message_id: str, unix_s: int, body: bytes) -> dict[str, str]:
    """The three headers of a message, signed with each of the secrets."""
    signed = b"%b.%d.%b" % (message_id.encode(), unix_s, body)
    signatures = [base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
