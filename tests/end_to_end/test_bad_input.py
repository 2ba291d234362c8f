"""Whatever is wrong with the input: one clear message, a non-zero exit, no traceback."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.app.cli import app
from freescale.errors import FreeScaleError
from tests.small_run import SMALL, spoil_loss


def freescale(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def refusal(*arguments: str) -> str:
    with pytest.raises(FreeScaleError) as caught:
        freescale(*arguments)
    return str(caught.value)


def test_the_process_prints_one_message_and_fails(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("run: {stepz: 3}\nmodl: {dim: 4}\nmodel: {kind: hstuu}\n")
    command = [sys.executable, "-m", "freescale", "train", str(recipe), "optim.lr=fast"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error:") == 1
    for told in ("run.steps", "did you mean model?", "did you mean hstu?", "optim.lr", "4 problems"):
        assert told in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "nowhere.yaml"), "the recipe does not exist"),
        (("train", "data.path=nowhere"), "data.path does not exist"),
        (("evaluate", "nowhere"), "not a run folder"),
        (("export", "nowhere", "out"), "not a run folder"),
        (("report", "nowhere"), "no such run folder"),
        (("train", "run.device=cuda"), "no usable CUDA device"),
        (("train", "--resume", "nowhere"), "no checkpoint to resume from"),
        (("train", "head.kind=ranking", "eval.metric=auc"), "needs the column 'action'"),
        (("train", "balance.cost_model=nowhere.json"), "cannot be read"),
    ],
)
def test_missing_things_are_named(
    arguments: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if "run.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    assert told in refusal(*arguments)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty"),
        ("1 5\n1 6 6\n1 7\n1 8\n1 9\n" + "1 5\n" * 50, "line 2: wrong number of fields"),
        ("1 5\n", "No user has 3 events"),
    ],
    ids=["empty", "three fields", "one event"],
)
def test_raw_data_is_refused_where_it_is_wrong(text: str, told: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw.txt"
    raw.write_text(text)
    assert told in refusal("prepare", str(raw), str(tmp_path / "out"), "--format", "pairs")
    assert told in refusal("train", f"data.path={raw}", f"run.out={tmp_path / 'run'}")
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    raw, data = tmp_path / "raw.txt", tmp_path / "data"
    raw.write_text("".join(f"{user} {item}\n" for user in range(50) for item in range(user % 7 + 4)))
    freescale("prepare", str(raw), str(data))
    shard = data / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-40])
    assert "shard-00000.parquet is missing or damaged" in refusal(
        "train", f"data.path={data}", f"run.out={tmp_path / 'run'}"
    )


def test_a_nan_loss_names_step_and_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_loss(monkeypatch, at_step=2)
    message = refusal("train", *SMALL, "run.steps=9", f"run.out={tmp_path}")
    assert "the loss is nan at step 2" in message
    assert "batch" in message
    assert "histories [" in message


@pytest.mark.parametrize(
    ("key", "tensor"), [("optim.lr", "model."), ("embedding.lr", "table.item.weight")], ids=["dense", "table"]
)
def test_weights_that_blow_up_end_the_run_before_they_are_saved(
    key: str, tensor: str, tmp_path: Path, python: str
) -> None:
    """After the first step: whether the loss of the second is still a number depends on the CPU."""
    options = ["run.checkpoint_every=1", "run.steps=9", f"run.out={tmp_path}"]
    command = [python, "-m", "freescale", "train", *SMALL, *options, f"{key}=1e30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"weights have blown up after step 1: {tensor}" in result.stderr
    assert f"lower {key}" in result.stderr
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_by_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [*SMALL, f"run.out={tmp_path}", "run.checkpoint_every=2", "run.eval_every=4"]
    freescale("train", *recipe, "run.steps=4")
    shard = next((tmp_path / "checkpoints" / "step-00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 0xFF
    shard.write_bytes(content)
    message = refusal("train", *recipe, "run.steps=6", "--resume", str(shard.parent))
    assert "is damaged" in message
    assert "step-00000002" in message
    capsys.readouterr()
    freescale("train", *recipe, "run.steps=6")
    assert "step-00000004 is damaged: shard-00000.safetensors has changed" in capsys.readouterr().out
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000004.bad", "step-00000006"]


def everything_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
    }


def test_who_looks_at_a_run_writes_nothing_into_it(tmp_path: Path) -> None:
    """Beside a training that is just writing a checkpoint."""
    run = tmp_path / "run"
    freescale("train", *SMALL, f"run.out={run}", "run.steps=4")
    (run / "checkpoints" / "step-00000008.tmp").mkdir()
    (run / "checkpoints" / "step-00000008.tmp" / "shard-00000.safetensors").write_bytes(b"half")
    before = everything_in(run)
    freescale("evaluate", str(run))
    freescale("export", str(run), str(tmp_path / "export"))
    assert everything_in(run) == before


def test_a_run_from_another_ones_checkpoint_needs_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, fork = tmp_path / "first", tmp_path / "second", tmp_path / "fork"
    freescale("train", *SMALL, f"run.out={first}", "run.steps=2")
    freescale("train", *SMALL, f"run.out={second}", "run.steps=4", "run.seed=7")
    before = everything_in(second)
    message = refusal("train", *SMALL, f"run.out={second}", "run.steps=4", "--resume", str(first))
    assert f"{second} holds another run" in message
    assert "choose another run.out" in message
    assert everything_in(second) == before
    freescale("train", *SMALL, f"run.out={fork}", "run.steps=4", "--resume", str(first))
    assert (fork / "checkpoints" / "step-00000004").exists()
    # Started again by the same command, as schedulers do: with what it has written since, not from the beginning.
    capsys.readouterr()
    for origin in (first, first / "checkpoints" / "step-00000002"):
        freescale("train", *SMALL, f"run.out={fork}", "run.steps=4", "--resume", str(origin))
        assert f"resuming {fork} from step 4" in capsys.readouterr().out
    # But not as a fork of anything else.
    message = refusal("train", *SMALL, f"run.out={fork}", "run.steps=4", "--resume", str(second))
    assert f"{fork} holds another run" in message
    # Killed before its first checkpoint: what is there is of another recipe all the same.
    for path in (second / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    message = refusal("train", *SMALL, f"run.out={second}", "run.steps=4", "--resume", str(first))
    assert "run.seed: 7 there, 1 now" in message


def test_ids_outside_the_table_are_refused(tmp_path: Path) -> None:
    message = refusal("train", *SMALL, "embedding.rows=20", f"run.out={tmp_path}", "run.steps=2")
    assert "an id lies outside the table" in message
    assert "embedding.rows" in message


def test_hashed_ids_fit_any_table(tmp_path: Path) -> None:
    freescale(
        "train", *SMALL, "embedding.id_map=hash", "embedding.rows=20", f"run.out={tmp_path}", "run.steps=2"
    )
    assert (tmp_path / "report.html").exists()


def test_a_zero_collision_table_too_small_for_its_buckets_is_refused(tmp_path: Path) -> None:
    options = ["embedding.id_map=zero_collision", "embedding.rows=100", "embedding.buckets=50"]
    message = refusal("train", *SMALL, *options, f"run.out={tmp_path}", "run.steps=2")
    assert "too small for its buckets" in message
    assert "100 rows in 50 buckets" in message
    assert "max_probe: must be at least 1" in refusal(
        "train", "embedding.id_map=zero_collision", "embedding.max_probe=0"
    )


def test_a_checkpoint_of_another_map_is_refused(tmp_path: Path) -> None:
    recipe = [*SMALL, "embedding.id_map=zero_collision", f"run.out={tmp_path}"]
    freescale("train", *recipe, "run.steps=2", "embedding.rows=300")
    message = refusal("train", *recipe, "run.steps=4", "embedding.rows=400", "embedding.eviction=lru")
    assert "embedding.rows: 300 there, 400 now" in message
    assert "embedding.eviction: 'none' there, 'lru' now" in message


def test_plan_ids_tells_rows_and_probes(capsys: pytest.CaptureFixture[str]) -> None:
    freescale("plan", "ids", "1000000", "--target", "0.001")
    told = capsys.readouterr().out
    assert "1,200,000" in told
    assert "128" in told
    assert "0.0350%" in told
    assert "target is a share" in refusal("plan", "ids", "10", "--target", "3")


def test_nothing_in_the_package_unpickles_from_disk() -> None:
    # What this process has pickled itself, or one that it has forked says through its own pipe, comes from no disk.
    own = r"s\(((self|worker)\.pipe\.recv_bytes\(\)|pickle\.dumps\()"
    dangerous = re.compile(
        rf"pickle\.load(?!{own})|torch\.load\(|yaml\.load\((?!text, StrictLoader)|yaml\.unsafe|allow_pickle=True"
        r"|(?<!\.)\b(eval|exec)\("
    )
    for path in (Path(__file__).parents[2] / "freescale").rglob("*.py"):
        assert not dangerous.search(path.read_text()), path.name
