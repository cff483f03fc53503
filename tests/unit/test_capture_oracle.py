"""Guests suspended at random places of real programs go on in another process and do there, to the byte and to the unit
of fuel, what they would have done."""

import json
import random
import subprocess
import sys
from pathlib import Path

import oracle_kit
import pytest
from interpreters import INTERPRETERS, interpreter
from oracle_kit import WORKS, Kind, Seen, driver_of, of_packed, of_works, random_points, write

from agentrt.backends import wasi
from agentrt.capture.instrument import Preempt, instrument

#: Loops, calls, closures, strings, exceptions and garbage, all inside the interpreter's own loop.
SCRIPT = """
let words = [], counts = {};
for (let i = 0; i < 300; i++) words.push('w' + (i * 7919 % 97));
for (const word of words) counts[word] = (counts[word] || 0) + 1;
let sorted = Object.keys(counts).sort((a, b) => counts[b] - counts[a] || (a < b ? -1 : 1));
let text = JSON.stringify(sorted.map(word => [word, counts[word]]));
let back = JSON.parse(text).filter(([word]) => /^w[1-5]+$/.test(word));
let thrown = 0;
for (let i = 0; i < 50; i++)
  try { if (i % 3 == 0) throw new Error(text.slice(i)); } catch (e) { thrown += e.message.length; }
print(back.length, thrown, text.length, 0.1 + 0.2);
"""


def check(kind: Kind, count: int, folder: Path) -> None:
    dice = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    driver = driver_of(kind)
    try:
        points = random_points(driver, kind.data, count, dice)
    finally:
        driver.close()
    assert len({point.frame for point in points}) > 8  # where there are only syscalls, there are not many
    write(folder, kind, points)
    done = subprocess.run(
        [sys.executable, oracle_kit.__file__, folder],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = [Seen(tuple(end), next_state) for end, next_state in json.loads(done.stdout)]
    assert seen == [point.expected for point in points]


@pytest.mark.parametrize("name", WORKS)
def test_some_random_places(name: str, tmp_path: Path) -> None:
    check(of_works(name), 15, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preempt", list(Preempt))
@pytest.mark.parametrize("name", WORKS)
def test_many_random_places(name: str, preempt: Preempt, tmp_path: Path) -> None:
    check(of_works(name, preempt), 110, tmp_path)  # eight times, and the interpreter's


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_many_random_places_in_an_interpreters_loop(tmp_path: Path) -> None:
    of = INTERPRETERS["quickjs"]
    code = instrument(interpreter("quickjs"), Preempt.ANYWHERE)
    check(of_packed(wasi.pack(code, args=(*of.arguments, SCRIPT), entry=of.entry)), 120, tmp_path)
