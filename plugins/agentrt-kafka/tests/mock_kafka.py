"""A Kafka cluster for tests: librdkafka's mock brokers, which speak the real protocol, in a process of their own.

    python mock_kafka.py BROKERS

Prints the bootstrap servers, then obeys lines on stdin and answers each with ``ok``: ``topic NAME PARTITIONS``,
``down`` (all brokers; what they have stays), ``up``. It ends with its stdin. The mock's C interface is bound with
ctypes, for confluent-kafka shows none of it to Python.
"""

import ctypes
import glob
import os
import sys
from typing import Any, Final

import confluent_kafka

_PRODUCER: Final = 0


def library() -> ctypes.CDLL:
    """The librdkafka that confluent-kafka brings."""
    folder = os.path.join(os.path.dirname(os.path.dirname(confluent_kafka.__file__)), "confluent_kafka.libs")
    (path,) = glob.glob(os.path.join(folder, "librdkafka*.so*"))
    found = ctypes.CDLL(path)
    bindings: tuple[tuple[str, Any, list[Any]], ...] = (
        ("rd_kafka_conf_new", ctypes.c_void_p, []),
        ("rd_kafka_new", ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]),
        ("rd_kafka_mock_cluster_new", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
        ("rd_kafka_mock_cluster_bootstraps", ctypes.c_char_p, [ctypes.c_void_p]),
        ("rd_kafka_mock_topic_create", ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
        ("rd_kafka_mock_broker_set_down", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
        ("rd_kafka_mock_group_initial_rebalance_delay_ms", None, [ctypes.c_void_p, ctypes.c_int32]),
        ("rd_kafka_mock_broker_set_up", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
    )
    for name, result, arguments in bindings:
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def main() -> None:
    """The process."""
    brokers = int(sys.argv[1])
    kafka = library()
    error = ctypes.create_string_buffer(512)
    handle = kafka.rd_kafka_new(_PRODUCER, kafka.rd_kafka_conf_new(), error, 512)
    assert handle, error.value
    cluster = kafka.rd_kafka_mock_cluster_new(handle, brokers)
    assert cluster
    # The default of 3 s is longer than the tests' sessions.
    kafka.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 200)
    print(kafka.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        failed = 0
        if command == "topic":
            failed = kafka.rd_kafka_mock_topic_create(cluster, arguments[0].encode(), int(arguments[1]), 1)
        else:
            change = kafka.rd_kafka_mock_broker_set_down if command == "down" else kafka.rd_kafka_mock_broker_set_up
            for broker in range(1, brokers + 1):
                failed = failed or change(cluster, broker)
        print("ok" if not failed else f"error {failed}", flush=True)


if __name__ == "__main__":
    main()
