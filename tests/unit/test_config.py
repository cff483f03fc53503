"""Settings: sources and their order, ranges, relations, messages, and the sizes worked out from them."""

import ast
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt import sizing
from agentrt.backends.process.settings import ProcessConfig
from agentrt.cli.config import as_toml, json_schema
from agentrt.config import (
    SECTIONS,
    Config,
    LimitsConfig,
    SchedulerConfig,
    SecretsConfig,
    StoreConfig,
    ToolsConfig,
    WasmConfig,
    load_config,
)
from agentrt.errors import ConfigError
from agentrt.machine import Machine, read_machine
from agentrt.settings import GIB, MIB, types_of

PACKAGE = Path(sizing.__file__).parent


def machine(**changes: Any) -> Machine:
    given: dict[str, Any] = {
        "cpus": (0, 1),
        "nodes": {0: (0, 1)},
        "cpu_quota": None,
        "memory_bytes": 16 * GIB,
        "map_count_max": 65_530,
        "cgroups": (),
    }
    return Machine(**(given | changes))


def test_sources_override_in_order(tmp_path: Path) -> None:
    file = tmp_path / "agentrt.toml"
    file.write_text("[scheduler]\nworkers = 3\naging_threshold = 7\nworker_nice = 5\n")
    env = {"AGENTRT_SCHEDULER__AGING_THRESHOLD": "8", "AGENTRT_SCHEDULER__WORKER_NICE": "6"}
    config = load_config(file, env=env, arguments={"scheduler.worker_nice": 7, "scheduler.workers": None})
    assert config.scheduler.workers == 3  # file over default; None in arguments leaves it alone
    assert config.scheduler.aging_threshold == 8  # environment over file
    assert config.scheduler.worker_nice == 7  # argument over environment
    assert config.limits == LimitsConfig()


def test_a_list_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "agentrt.toml"
    file.write_text('[node]\nload = ["crm.agents", "index.wasm"]\n[node.agents.small]\nsource = "a.wasm"\ntier = 2\n')
    assert load_config(file, env={}).node.load == ("crm.agents", "index.wasm")
    assert load_config(env={"AGENTRT_NODE__LOAD": "a.py, b.wasm"}).node.load == ("a.py", "b.wasm")
    assert load_config(env={"AGENTRT_NODE__LOAD": ""}).node.load == ()
    written = tmp_path / "written.toml"
    written.write_text(as_toml(load_config(file, env={})))
    assert load_config(written, env={}) == load_config(file, env={})
    with pytest.raises(ConfigError, match="node.load"):
        load_config(arguments={"node.load": [1]})


def test_the_file_may_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "agentrt.toml"
    file.write_text("[wasm]\nmemory_bytes_max = '64 MiB'\n")
    assert load_config(env={"AGENTRT_CONFIG": str(file)}).wasm.memory_bytes_max == 64 * MIB


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("SCHEDULER__QUANTUM_MS", "1, 2,3,4", (1, 2, 3, 4)),
        ("SCHEDULER__QUANTUM_MS", "[1,2,3,4]", (1, 2, 3, 4)),
        ("SCHEDULER__QUEUE_ITEMS_MAX", "10_000", 10_000),
        ("SCHEDULER__QUEUE_BYTES_MAX", "2GiB", 2 * GIB),
        ("SCHEDULER__QUEUE_BYTES_MAX", " 64 mib ", 64 * MIB),
        ("SCHEDULER__PIN", "true", True),
        ("SCHEDULER__PIN", "0", False),
        ("STORE__PATH", "/x, y", "/x, y"),
        ("NODE__CONTROL_NICE", "-5", -5),
    ],
)
def test_text_from_the_environment(name: str, text: str, value: object) -> None:
    config = load_config(env={"AGENTRT_" + name: text})
    section, _, key = name.lower().partition("__")
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("workers = 3", "'workers'"),
        ("[shceduler]\nworkers = 3", "'shceduler'"),
        ("[scheduler]\nworker = 3", "scheduler.workers"),  # as a suggestion
        ("[scheduler]\nworkers = 65", "scheduler.workers: 65 is out of range. Allowed: 0 to 64 threads"),
        ("[scheduler]\nworkers = '3x'", "scheduler.workers"),
        ("[scheduler]\nworkers = 3.5", "scheduler.workers"),
        ("[scheduler]\npin = 1", "scheduler.pin"),
        ("[scheduler]\nquantum_ms = [1, 2, 3]", "scheduler.quantum_ms"),
        ("[scheduler]\nquantum_ms = [1, 2, 3, 0]", "scheduler.quantum_ms: 0 is out of range"),
        ("[scheduler]\nqueue_bytes_max = '12 parsecs'", "scheduler.queue_bytes_max"),
        ("[store]\npath = 5", "store.path"),
        ("[scheduler\n", "is not TOML"),
        ("[tools]\ntemplate = 'fork'", "tools.template"),
        ("[tools]\nclasses = 3", "tools.classes is not at most"),
        ("[tools.classes]\ncode = 3", "tools.classes: 'code' is no table"),
        ("[tools.classes.Code]\nspares = 1", "tools.classes: 'Code' is no table with a name"),
        ("[tools.classes.a__b]\nspares = 1", "tools.classes: 'a__b' is no table with a name"),
        ("[tools.classes.code]\nspare = 1", "tools.classes.code: there is no setting 'spare'"),
        ("[tools.classes.code]\nstarts_max = 1", "tools.classes.code: there is no setting 'starts_max'"),
        ("[tools.classes.code]\nhosts_max = 0", "tools.classes.code: tools.hosts_max: 0 is out of range"),
        ("[tools.classes.code.more]\nspares = 0", "tools.classes.code: there is no setting 'more'"),
        ("[scheduler.classes.code]\nspares = 0", "there is no setting scheduler.classes"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, toml: str, named: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_config(file, env={})
    assert named in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load_config(tmp_path / "none.toml", env={})


def test_the_source_is_named() -> None:
    with pytest.raises(ConfigError, match=r"environment variable AGENTRT_SCHEDULER__WORKERS: scheduler\.workers"):
        load_config(env={"AGENTRT_SCHEDULER__WORKERS": "many"})
    with pytest.raises(ConfigError, match=r"environment variable AGENTRT_SCHEDULR__WORKERS: there is no section"):
        load_config(env={"AGENTRT_SCHEDULR__WORKERS": "2"})
    with pytest.raises(ConfigError, match=r"argument wasm.guests: there is no setting"):
        load_config(env={}, arguments={"wasm.guests": 2})


def test_variables_that_are_no_settings_are_ignored() -> None:
    assert load_config(env={"AGENTRT_CONFIG": "", "AGENTRT_TOKEN": "x", "PATH": "/bin"}) == Config()


BOUNDED = [
    (s, k)
    for s, t in SECTIONS.items()
    for k, known in types_of(t).items()
    if known.kind is int or (known.kind is tuple and known.exact != tuple[str, ...])
]


@pytest.mark.parametrize(("section", "key"), BOUNDED)
def test_every_bound_holds(section: str, key: str) -> None:
    """Also when a section is made in code, where no loader looks."""
    known = types_of(SECTIONS[section])[key]
    assert known.low is not None and known.high is not None and known.unit and known.effect

    def make(value: int) -> object:
        return SECTIONS[section](**{key: (value,) * 4 if known.kind is tuple else value})

    make(known.low)
    make(known.high)
    for beyond in (known.low - 1, known.high + 1):
        with pytest.raises(ConfigError, match=rf"{section}\.{key}: {beyond} is out of range"):
            make(beyond)


@pytest.mark.parametrize(
    "sections",
    [
        {"wasm": WasmConfig(guests_max=10, stacks_max=11)},
        {"store": StoreConfig(map_bytes=2 * GIB, map_bytes_max=GIB)},
        {"limits": LimitsConfig(request_bytes_max=16 * MIB), "scheduler": SchedulerConfig(queue_bytes_max=MIB)},
        {"limits": LimitsConfig(result_bytes_max=16 * MIB, journal_bytes_max=MIB)},
        {"limits": LimitsConfig(result_bytes_max=16 * MIB), "store": StoreConfig(backlog_bytes_max=MIB)},
        {"tools": ToolsConfig(classes={"code": {"hosts_max": 3}})},
        {
            "tools": ToolsConfig(classes={"code": {"queue_bytes_max": MIB}}),
            "limits": LimitsConfig(request_bytes_max=MIB * 2),
        },
        {"secrets": SecretsConfig(folder="/x", environment_prefix="X_")},
        {"process": ProcessConfig(memory_high_bytes=GIB, memory_max_bytes=GIB + MIB)},
        {"process": ProcessConfig(memory_high_bytes=2 * GIB, memory_max_bytes=GIB)},
    ],
)
def test_relations_are_checked(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\w+\.\w+ is (more|less) than"):
        Config(**sections)


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().scheduler.workers = 5  # type: ignore[misc]


@given(st.data())
def test_settings_shown_as_toml_are_read_back(data: st.DataObject) -> None:
    from agentrt.cli.config import as_toml

    drawn: dict[str, dict[str, Any]] = {}
    for name in ("node", "tools"):  # without relations, so any values within bounds will do
        for key, known in types_of(SECTIONS[name]).items():
            if known.kind is int and data.draw(st.booleans()) and key not in ("hosts_max", "calls_per_host_max"):
                drawn.setdefault(name, {})[key] = data.draw(st.integers(known.low, known.high))
    drawn.get("tools", {}).pop("hosts_per_domain_max", None)
    drawn.get("tools", {}).pop("sync_calls_per_host_max", None)
    drawn.get("tools", {}).pop("queue_bytes_max", None)
    path = data.draw(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=20))
    config = Config(store=StoreConfig(path=path), **{name: SECTIONS[name](**given) for name, given in drawn.items()})
    tables = tomllib.loads(as_toml(config))
    assert Config(**{name: SECTIONS[name](**_tuples(values)) for name, values in tables.items()}) == config


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9\-]{0,5}(_[a-z0-9\-]{1,5})?", fullmatch=True),
        st.dictionaries(st.sampled_from(["spares", "host_nice", "idle_timeout_ms"]), st.integers(0, 19)),
        max_size=4,
    )
)
def test_classes_of_tools_shown_as_toml_are_read_back(classes: dict[str, dict[str, int]]) -> None:
    from agentrt.cli.config import as_toml

    config = Config(tools=ToolsConfig(classes=classes))
    tables = tomllib.loads(as_toml(config))
    assert load_config(env={}, arguments={f"tools.{key}": value for key, value in tables["tools"].items()}) == config


def test_a_class_of_tools_differs_in_what_it_sets(tmp_path: Path) -> None:
    file = tmp_path / "agentrt.toml"
    file.write_text("[tools]\nspares = 3\n[tools.classes.code]\nhosts_max = 9\nhost_memory_bytes_max = '64 MiB'\n")
    env = {"AGENTRT_TOOLS__CLASSES__CODE__HOSTS_MAX": "8", "AGENTRT_TOOLS__CLASSES__WEB__SPARES": "0"}
    config = load_config(file, env=env, arguments={"tools.classes.web.host_nice": 5})
    assert config.tools.classes == {
        "code": {"hosts_max": 8, "host_memory_bytes_max": 64 * MIB},
        "web": {"spares": 0, "host_nice": 5},
    }
    limits = sizing.tool_class_limits(config, machine())
    assert {cls: (each.hosts_max, each.spares, each.host_nice) for cls, each in limits.items()} == {
        "code": (8, 3, 19),
        "web": (64, 0, 5),
    }
    assert limits["code"].host_memory_bytes_max == 64 * MIB
    with pytest.raises(ConfigError, match=r"AGENTRT_TOOLS__CLASSES__CODE__HOSTS_MAX.*tools\.hosts_max"):
        load_config(env={"AGENTRT_TOOLS__CLASSES__CODE__HOSTS_MAX": "many"})


def test_every_setting_has_an_effect() -> None:
    """A setting that no code reads would be a lie in the reference."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("config.py", "reference.py") or path.parent.name == "cli":
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    unread = [f"{name}.{key}" for name, section in SECTIONS.items() for key in types_of(section) if key not in read]
    assert not unread


# --- sizes ---------------------------------------------------------------------


def maps_needed(guests: int, stacks: int, light_guards: bool = False) -> int:
    return (0 if light_guards else 2 * stacks) + 4 * guests + sizing.MAPS_MARGIN


@given(
    map_count=st.integers(8_000, 4_000_000),
    guests=st.integers(0, 20_000),
    stacks=st.integers(0, 20_000),
    memory=st.sampled_from([0, 256 * MIB, 4 * GIB, 512 * GIB]),
    light=st.booleans(),
)
def test_pools_fit_the_mapping_limit_or_are_refused(
    map_count: int, guests: int, stacks: int, memory: int, light: bool
) -> None:
    if guests and stacks > guests:
        return
    config = Config(wasm=WasmConfig(guests_max=guests, stacks_max=stacks))
    try:
        given = machine(map_count_max=map_count, memory_bytes=memory, light_guards=light)
        got_guests, got_stacks = sizing.pool_sizes(config, given)
    except ConfigError as error:
        assert guests or stacks, "what was left to be derived must fit"
        assert "vm.max_map_count" in str(error)
        return
    assert 1 <= got_stacks <= got_guests
    assert maps_needed(got_guests, got_stacks, light) <= map_count * 4 // 5
    assert got_guests == (guests or got_guests)
    assert got_stacks == (stacks or got_stacks)


def test_derived_pools_use_what_there_is() -> None:
    guests, stacks = sizing.pool_sizes(Config(), machine())
    assert guests == stacks
    assert maps_needed(guests + 1, stacks + 1) > 65_530 * 4 // 5
    assert sizing.pool_sizes(Config(), machine(light_guards=True)) == (sizing.GUESTS_DERIVED_MAX,) * 2
    # With room to spare the cap holds; with little memory the stacks, which keep their pages, are the limit.
    assert sizing.pool_sizes(Config(), machine(map_count_max=10**6))[0] == sizing.GUESTS_DERIVED_MAX
    guests, stacks = sizing.pool_sizes(Config(), machine(memory_bytes=512 * MIB))
    assert stacks * Config().wasm.wasm_stack_bytes <= 128 * MIB


def test_the_hint_names_a_limit_that_suffices() -> None:
    config = Config(wasm=WasmConfig(guests_max=20_000))
    with pytest.raises(ConfigError) as caught:
        sizing.pool_sizes(config, machine())
    limit = int(str(caught.value).rpartition("=")[2])
    assert sizing.pool_sizes(config, machine(map_count_max=limit))[0] == 20_000
    with pytest.raises(ConfigError):
        sizing.pool_sizes(config, machine(map_count_max=limit - 2))


def test_workers_follow_cores_and_quota() -> None:
    assert machine(cpus=tuple(range(8))).workers == 8
    assert machine(cpus=tuple(range(100))).workers == 64
    assert machine(cpus=tuple(range(8)), cpu_quota=2.5).workers == 3
    assert machine(cpus=(0,), cpu_quota=0.2).workers == 1


def test_core_parameters_are_in_the_core_s_units() -> None:
    config = Config(scheduler=SchedulerConfig(workers=5, quantum_ms=(1, 2, 3, 4)))
    parameters = sizing.core_parameters(config, machine())
    assert parameters["workers"] == 5
    assert parameters["quantum_ns"] == (1_000_000, 2_000_000, 3_000_000, 4_000_000)
    assert parameters["aging_wait_ns"] == (0, 0, 300 * 10**9, 1800 * 10**9)
    assert Path(parameters["engine_lib"]).is_file()
    assert sizing.core_parameters(Config(), machine())["workers"] == 2


def test_tool_limits_keep_the_numbers() -> None:
    config = load_config(env={}, arguments={"tools.hosts_max": 9, "tools.idle_timeout_ms": 5})
    limits = sizing.tool_limits(config)
    assert (limits.hosts_max, limits.idle_timeout_ns) == (9, 5_000_000)
    assert limits.result_bytes_max == Config().limits.result_bytes_max
    assert sizing.tool_limits(Config(), machine(cpus=(0, 1, 2, 3, 4))).starts_max == 2
    assert sizing.tool_limits(Config(), machine(cpus=(0,))).starts_max == 1


# --- the machine ---------------------------------------------------------------


def fake_root(tmp_path: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def test_limits_of_a_v2_group_and_those_above_it(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        {
            "/proc/self/mountinfo": V2,
            "/proc/self/cgroup": "0::/a/b\n",
            "/proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\n",
            "/sys/fs/cgroup/cgroup.procs": "",
            "/sys/fs/cgroup/a/cgroup.procs": "",
            "/sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            "/sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
            "/sys/fs/cgroup/a/b/cgroup.procs": "",
            "/sys/fs/cgroup/a/b/cgroup.controllers": "cpu memory pids\n",
            "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
        },
    )
    found = read_machine(root)
    assert found.cpu_quota == 1.5
    assert found.memory_bytes == 2 * GIB
    assert {(group.controller, group.version) for group in found.cgroups} == {("cpu", 2), ("memory", 2), ("pids", 2)}


def test_limits_on_a_hybrid_host(tmp_path: Path) -> None:
    """A v2 line exists, yet memory and cpu are on v1: unknown is not unlimited."""
    root = fake_root(
        tmp_path,
        {
            "/proc/self/mountinfo": "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "33 30 0:29 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "/proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n",
            "/proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\n",
            "/sys/fs/cgroup/cpu,cpuacct/cgroup.procs": "",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "/sys/fs/cgroup/cpu,cpuacct/job/cgroup.procs": "",
            "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
            "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "/sys/fs/cgroup/memory/cgroup.procs": "",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "/sys/fs/cgroup/unified/cgroup.controllers": "\n",
            "/sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    found = read_machine(root)
    assert found.cpu_quota == 0.5
    assert found.memory_bytes == GIB
    assert {(group.controller, group.version) for group in found.cgroups} == {("memory", 1), ("cpu", 1), ("cpuacct", 1)}


def test_an_unreadable_machine_is_unknown_not_unlimited(tmp_path: Path) -> None:
    found = read_machine(str(tmp_path))
    assert (found.cpu_quota, found.memory_bytes, found.map_count_max, found.cgroups) == (None, 0, None, ())
    usual = msgspec.structs.replace(found, map_count_max=65_530)
    assert sizing.pool_sizes(Config(), found) == sizing.pool_sizes(Config(), usual)


@pytest.mark.parametrize(
    ("table", "fits"),
    [
        ({"scheduler": {"workers": 2, "quantum_ms": [50, 200, 500, 1000]}, "http": {"listen": "[::1]:1"}}, True),
        (
            {"wasm": {"memory_bytes_max": "64 MiB"}, "node": {"load": ["a"], "agents": {"x": {"source": "y.wasm"}}}},
            True,
        ),
        ({"tools": {"classes": {"code": {"hosts_max": 8}}}, "models": {"providers": {"a": {"kind": "openai"}}}}, True),
        ({"scheduler": {"workers": 65}}, False),
        ({"scheduler": {"quantum_ms": [1, 2]}}, False),
        ({"scheduler": {"werkers": 2}}, False),
        ({"node": {"agents": {"x": {"sauce": "y.wasm"}}}}, False),
        ({"nodes": {}}, False),
    ],
)
def test_the_schema_knows_what_a_file_may_hold(table: dict[str, Any], fits: bool) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    assert validator.is_valid(table) is fits
