"""Benchmarks: one module a question, run as ``python -m perf NAME [--json] [--tiny] [--dir FOLDER]``.

    runq      a push and a pop of the run queue, and the worst push of a control plane among busy workers
    spawn     how fast runs start and end, what an idle one takes
    switch    yielding, requeueing, going on with another guest; what scheduling takes of a guest's time
    latency   how soon urgent work starts while every core is busy with code that never yields
    density   how many suspended guests fit, and what each takes besides its own memory
    journal   durable steps a second
    blobs     what a large payload costs the commits beside it
    frames    taking the state of a guest, in times of copying and comparing its memory
    steps     runs of twenty durable steps, one at a time and 200 at once, beside LangGraph and DBOS
    step_floor  what of a step's time is the engine's, and what is left without one

The last line is one JSON object: ``figures`` are agentrt's, ``baselines`` what a user would pick instead, measured in
the same call by the same rules, ``machine`` where that was, how busy it was, and ``notes``: what could not be measured.
Keys end in their unit. Figures with their commands: perf/RESULTS.md.

Where pyperf fits and where not. Operations of Python that can be repeated in a loop (heapq, asyncio, wasmtime-py) are
timed by its rules and with its clock: calibrated loops, a warm-up, the median of the values (`perf.timing`). It is not
used where one value says nothing (latencies are distributions, and their tail is the question), where a run has
state that must not be repeated in a loop (stores, pools of slots that are warm or not), where several threads
take part, and below 100 ns, where the work is in C and calling it from Python would be what is measured.

Each part that is sensitive to what ran before (resident memory, thread priorities, warm slots) runs in a process of its
own (`perf.timing.isolated`).
"""
