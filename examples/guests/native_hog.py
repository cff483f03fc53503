# mypy: ignore-errors
#
# A hog that is a native process: this agent only asks for it and waits, as one would that runs code it wrote.
import json
import sys

import host

order = json.loads(sys.stdin.read())
request = {"tool": "native_hog", "args": {"text": str(order["rounds"])}}
answer = json.loads(host.call("tool.call", json.dumps(request)))
if not answer["ok"]:
    raise RuntimeError(answer["error"]["code"] + ": " + answer["error"].get("message", ""))
print(json.dumps(answer["value"]))
