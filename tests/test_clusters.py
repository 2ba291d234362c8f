"""The files of docs/clusters.md: the manifest and the batch script say what the page says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from freescale import errors
from freescale.app.cli import app

DOCS = Path(__file__).parents[1] / "docs"
MANIFEST = DOCS / "examples" / "kubernetes.yaml"
SCRIPT = DOCS / "examples" / "slurm.sh"


@pytest.fixture
def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def test_pods_find_each_other_by_the_names_of_the_service(documents):
    service, job = documents["Service"], documents["Job"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master {job['metadata']['name']}-0.{pod['subdomain']}:29500" in command_of(pod)
    assert pod["containers"][0]["ports"] == [{"containerPort": 29500}]


def test_as_many_pods_as_machines_and_as_many_gpus_as_ranks(documents):
    spec = documents["Job"]["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert f"--nnodes {spec['completions']} " in command_of(pod)
    assert f"--nproc {pod['containers'][0]['resources']['limits']['nvidia.com/gpu']} " in command_of(pod)


def test_what_the_job_does_with_our_exit_codes(documents):
    spec = documents["Job"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a failure policy requires it
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert actions == {
        errors.EXIT_ERROR: "FailJob",
        2: "FailJob",
        errors.EXIT_PREEMPTED: "Ignore",
        errors.EXIT_PEER: "Ignore",
    }
    names = {container["name"] for container in spec["template"]["spec"]["containers"]}
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == names


def test_volumes_that_are_mounted_are_there(documents):
    pod = documents["Job"]["spec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert f"run.out={mounted['runs']}/" in command_of(pod)


def command_of(pod: dict[str, Any]) -> str:
    return pod["containers"][0]["args"][0]


@pytest.mark.parametrize("where", ["kubernetes", "slurm", "page"])
def test_every_option_of_the_examples_is_one_of_ours(where, documents):
    help_text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    text = {
        "kubernetes": command_of(documents["Job"]["spec"]["template"]["spec"]),
        "slurm": SCRIPT.read_text(),
        "page": (DOCS / "clusters.md").read_text(),
    }[where]
    commands = re.findall(r"freescale train recipe.yaml[^#`\n]*|freescale train /[^`]*", text)
    assert commands
    for command in commands:
        for word in shlex.split(command):
            assert not word.startswith("--") or word in help_text, word


def test_the_batch_script_is_a_shell_script_that_requeues_what_was_preempted():
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n", str(SCRIPT)], check=True, timeout=20)
    text = SCRIPT.read_text()
    assert f"$code -eq {errors.EXIT_PREEMPTED} ]" in text
    assert "#SBATCH --signal=TERM@120" in text
    assert "#SBATCH --requeue" in text


def test_the_page_lists_every_exit_code():
    page = (DOCS / "clusters.md").read_text()
    for code in (
        0,
        errors.EXIT_ERROR,
        2,
        errors.EXIT_UNEXPECTED,
        errors.EXIT_PREEMPTED,
        errors.EXIT_PEER,
        130,
    ):
        assert f"\n| {code} | " in page


@pytest.mark.extras
def test_the_manifest_fits_the_models_of_the_kubernetes_client(documents):
    client = pytest.importorskip("kubernetes").client
    api = client.ApiClient()
    for kind, document in documents.items():
        # All required fields, right types.
        made = api.deserialize(SimpleNamespace(data=json.dumps(document)), f"V1{kind}")
        assert api.sanitize_for_serialization(made) == document  # and none the client does not know
