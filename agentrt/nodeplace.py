"""Where a node is, for the commands and the client that look for one."""

from typing import Final

URL_VARIABLE: Final = "AGENTRT_URL"
KEY_VARIABLE: Final = "AGENTRT_KEY"
URL_DEFAULT: Final = "http://127.0.0.1:8420"
