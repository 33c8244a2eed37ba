"""Records of a benchmark run: settings, methods, requests, machine, and the run folder."""

from draftwood.bench.records.machine import (
    LoadMeter,
    describe_machine,
    describe_model,
    list_versions,
    measure_peak_memory,
)
from draftwood.bench.records.methods import (
    DRAFTER,
    PEER,
    PLAIN,
    BenchMethod,
    check_memories,
    list_labels,
    parse_method,
    parse_methods,
)
from draftwood.bench.records.run_folder import (
    DIFFERENT,
    ERROR,
    FORMAT,
    IDENTICAL,
    MANIFEST,
    REQUESTS,
    TIE,
    VERSION,
    BenchRun,
    LosslessVerdict,
    RequestKey,
    RequestRecord,
    RunManifest,
    append_records,
    drop_partial_line,
    lock_run,
    read_manifest,
    read_records,
    read_run,
    read_runs,
    write_manifest,
    write_records,
)
