"""The job description: read as strictly as a stage, with one message for each mistake."""

import sys

import pytest
from palimpsa_launch.job import load_job, parse_time

from megatron_palimpsa.config import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:00", 5400),
        ("1-6", 108000),
        ("1-6:30", 109800),
        ("1-6:30:15", 109815),
        ("2-00:00:00", 172800),
    ],
)
def test_time_is_read_as_slurm_reads_it(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "job: time is missing"),
        ({"time": "soon"}, "time='soon'"),
        ({"time": 43200}, "time=43200: Value error, put it in quotes"),
        ({"time": "4"}, "time=4 is 240 s; it must be above save_seconds=300"),
        ({"time": "60", "node": 2}, "unknown key 'node'; known keys are time, nodes"),
        ({"time": "60", "nodes": 0}, "nodes=0"),
        ({"time": "60", "nodes": "two"}, "nodes='two'"),
        ({"time": "60", "gpus_per_node": 0}, "processes_per_node is missing"),
        ({"time": "60", "exclusive": False}, "set cpus_per_node and memory"),
        ({"time": "60", "partition": "gpu --wrap=x"}, "partition='gpu --wrap=x'"),
        ({"time": "60", "partition": "gpu\n#SBATCH --uid=0"}, "partition="),
        ({"time": "60", "account": "-x"}, "account='-x'"),
        ({"time": "60", "constraint": "a b"}, "constraint='a b'"),
        ({"time": "60", "exclude": "node1#"}, "exclude='node1#'"),
        ({"time": "60", "python": "/bin/python\nrm"}, "python="),
        ({"time": "60", "variables": {"A B": "1"}}, "A B"),
        ({"time": "60", "variables": {"stage_folder": "/"}}, "stage_folder"),
        ({"time": "60", "variables": {"SLURM_JOB_ID": "1"}}, "variables.SLURM_JOB_ID is not for a job to set"),
        ({"time": "60", "variables": {"PATH": "/x"}}, "variables.PATH"),
        ({"time": "60", "container": {"engine": "docker", "image": "x"}}, "container.engine='docker'"),
        (
            {"time": "60", "container": {"engine": "pyxis", "image": "x", "img": 1}},
            "known keys are engine, image, mounts",
        ),
        ({"time": "60", "container": {"engine": "pyxis", "image": "a,b"}}, "container.image='a,b'"),
        ({"time": "60", "container": {"engine": "apptainer", "image": "--writable"}}, "container.image='--writable'"),
        ({"time": "60", "container": {"engine": "pyxis", "image": "x", "mounts": ["/a,/b"]}}, "container.mounts.0"),
    ],
)
def test_mistakes_are_named(changes, expected):
    with pytest.raises(ConfigError) as caught:
        load_job(None, changes)
    assert expected in str(caught.value)


def test_file_base_and_options(tmp_path):
    (tmp_path / "cluster.yaml").write_text("partition: gpu\ntime: '60'\nvariables: {NCCL_DEBUG: WARN}\n")
    (tmp_path / "job.yaml").write_text("base: cluster.yaml\nnodes: 8\ntime: '2-00:00:00'\n")
    job = load_job(tmp_path / "job.yaml", {"nodes": 2, "partition": None})
    assert (job.nodes, job.partition, job.seconds, job.ranks) == (2, "gpu", 172800, 16)
    assert job.variables == {"NCCL_DEBUG": "WARN"}
    assert job.interpreter == sys.executable
