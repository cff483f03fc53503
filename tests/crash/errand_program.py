"""The errand as a program: what errand_agents.py does, step by step."""

from typing import Any

from agentrt.process_client import Context, StepFailed, serve


def errand(ctx: Context, input: Any) -> Any:
    order, place = input["order"], input.get("place", 0)
    if place:
        with ctx.lock("dock"):
            ctx.tool("errand_keyed", order=order, place=place)
        return place
    if ctx.restored is None:
        ctx.tool("errand_keyed", order=order, place=1)
        ctx.checkpoint("begun")
    with ctx.lock("dock"):
        first = ctx.spawn("errand", {"order": order, "place": 5})
        ctx.tool("errand_reconcilable", order=order, place=2)
        ctx.sleep(0.06)  # long enough to leave memory
    second = ctx.spawn("errand", {"order": order, "place": 6})
    approval = ctx.approval("go on?")
    try:
        ctx.tool("errand_at_most_once", order=order, place=3)
    except StepFailed:
        pass  # who knows whether it happened is an operator, who may have given it up
    children = [ctx.join(first), ctx.join(second)]
    ctx.tool("errand_keyed", order=order, place=4)
    return {"order": order, "approved": approval["approved"], "children": children}


if __name__ == "__main__":
    serve(errand)
