"""Files that are somewhere else: the error names the command that fetches them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.refusals import refusal
from mupscale.files.directory import read_directory
from mupscale.files.elsewhere import POINTER, hub_name

LFS = POINTER + b"v1\noid sha256:abc\nsize 927832\n"


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "some base"
    folder.mkdir()
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_called_one(base, name):
    (base / name).write_bytes(LFS)
    refusal(lambda: read_directory(base), "file.lfs_pointer", where=[name, f"git -C '{base}' lfs pull"])


def test_a_pointer_in_a_shard_and_one_that_nobody_reads(base):
    (base / "pytorch_model.bin").write_bytes(LFS)
    assert read_directory(base).tensors, "control: weights in another format are not read"
    (base / "model.safetensors").rename(base / "model-00001-of-00002.safetensors")
    (base / "model-00002-of-00002.safetensors").write_bytes(LFS)
    where = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    refusal(lambda: read_directory(base), "file.lfs_pointer", where="model-00002-of-00002.safetensors")


def cached(base, tmp_path, *revisions):
    root = tmp_path / "models--org--some-7b"
    for revision in revisions:
        shutil.copytree(base, root / "snapshots" / revision)
    (root / "refs").mkdir(parents=True)
    return root


def test_the_cache_of_a_model_names_its_snapshot(base, tmp_path):
    root = cached(base, tmp_path, "0a1b", "2c3d")
    snapshots = [f"{root}/snapshots/0a1b", f"{root}/snapshots/2c3d"]
    refusal(lambda: read_directory(root), "directory.is_hub_cache", where=snapshots)
    (root / "refs" / "main").write_text("2c3d")
    said = refusal(lambda: read_directory(root), "directory.is_hub_cache", where=snapshots[1])
    assert "0a1b" not in str(said), "the revision that main names"
    assert read_directory(root / "snapshots" / "2c3d").tensors, "the remedy works"
    assert hub_name(root / "snapshots" / "2c3d") == "org/some-7b"
    assert hub_name(base) is None


def test_a_name_on_the_hub_is_answered_with_the_download(base, monkeypatch):
    monkeypatch.chdir(base.parent)
    name = "meta-llama/Llama-3.2-1B"
    command = f"hf download {name} --local-dir Llama-3.2-1B"
    refusal(lambda: read_directory(Path(name)), "directory.does_not_exist", where=command)


@pytest.mark.parametrize("path", ["some base/typo", "nowhere", "a/b/c", "./a/b"])
def test_other_paths_are_not_taken_for_names_on_the_hub(base, monkeypatch, path):
    """Control: the folder above exists, or the form is another."""
    monkeypatch.chdir(base.parent)
    if path == "./a/b":
        (base.parent / "a").mkdir()
    said = refusal(lambda: read_directory(Path(path)), "directory.does_not_exist", where=str(Path(path)))
    assert "hf download" not in str(said)


def test_the_download_command_exists():
    """The remedy's program takes these words, as far as can be seen without a network."""
    program = Path(sys.executable).with_name("hf")
    if not program.exists():
        pytest.skip("needs huggingface_hub's command line")
    done = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--local-dir" in done.stdout
