"""The drafters and datastores that come with spectrain: they open, and a user's own goes before them."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

from spectrain import load_method, load_target
from spectrain.decoding import generate
from spectrain.decoding.text import Reply
from spectrain.errors import UserError
from spectrain.exports.cards import TEMPLATES
from spectrain.exports.exporting import DECODE
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.options import find_artifact
from spectrain.retrieval.datastore import largest_datastore, open_datastore
from spectrain.stores.locations import SHIPPED, SHIPPED_STORES, shipped_folders
from tests.models.test_artifacts import export_spire

pytestmark = pytest.mark.shipped
PROMPT = 'def read_config(path):\n    """Read the configuration of a file."""\n'


@pytest.fixture(scope="module")
def bundled():
    return load_target("pystdlib-8l")


def test_the_bundled_target_gains_from_the_first_command(bundled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without a checkpoints/ folder, as after an installation
    method = load_method("spire", bundled, gamma=4)  # how many pay depends on the machine, and on what else it does
    prompt = bundled.tokenizer(PROMPT)["input_ids"]
    (plain,) = generate(bundled, Autoregressive(), [prompt], 64)
    (drafted,) = generate(bundled, method, [prompt], 64)
    assert drafted.tokens == plain.tokens
    assert Reply("", drafted).acceptance_length > 2


def test_a_drafter_of_the_users_own_goes_before_the_shipped_one_where_it_is_better(
    bundled, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    assert find_artifact("spire", bundled).endswith("pystdlib-8l-spire")
    (tmp_path / "checkpoints").mkdir()
    own = export_spire(tmp_path / "checkpoints" / "spire-own", bundled)
    manifest = json.loads((own / "spectrain.json").read_text())
    for tau, expected in ((None, "pystdlib-8l-spire"), (1.1, "pystdlib-8l-spire"), (3.9, "checkpoints/spire-own")):
        manifest["trained"]["tau"] = tau and {"spire": {"256 tokens, T=1": {"value": tau}}}
        (own / "spectrain.json").write_text(json.dumps(manifest))
        with caplog.at_level(logging.INFO):
            assert find_artifact("spire", bundled).endswith(expected)
    assert "drafter: checkpoints/spire-own" in caplog.text


def test_each_shipped_folder_has_a_card_with_its_numbers_and_is_small():
    assert [folder.name for folder in shipped_folders(SHIPPED)] == list(SHIPPED)
    for folder in shipped_folders(SHIPPED):
        manifest = json.loads((folder / "spectrain.json").read_text())
        card, trained = (folder / "README.md").read_text(), manifest["trained"]
        if manifest["kind"] == "head":
            assert f"{trained['metrics']['eval/kl_binary']:.4f}" in card
            drafter = json.loads((folder / "config.json").read_text())["drafter"]["path"]
            assert drafter in {f"checkpoints/{name}" for name in SHIPPED}
        else:
            assert trained["tau"], folder
            assert "Acceptance length tau" in card
        assert "/tmp" not in card + (folder / "spectrain.json").read_text()
        assert (folder / DECODE).read_bytes() == (TEMPLATES / "custom_generate.py").read_bytes()
        assert sum(file.stat().st_size for file in folder.iterdir()) < 24e6


def test_a_shipped_datastore_opens_and_one_of_the_users_own_goes_before_it(tmp_path):
    folders = shipped_folders(SHIPPED_STORES)
    assert [folder.name for folder in folders] == list(SHIPPED_STORES)
    for folder in folders:
        store = open_datastore(folder, None)
        store.verify()
        manifest = store.manifest
        prints = manifest.tokenizer_fingerprint, manifest.target_fingerprint
        assert largest_datastore(tmp_path, *prints) == folder
        card = (folder / "README.md").read_text()
        assert f"{manifest.tokens:,} tokens" in card
        assert "/tmp" not in card + (folder / "manifest.json").read_text()
        assert sum(file.stat().st_size for file in folder.iterdir()) < 12e6
        own = tmp_path / f"own-{folder.name}"
        shutil.copytree(folder, own)
        assert largest_datastore(tmp_path, *prints) == own
        with pytest.raises(UserError, match="holds no datastore for this target; build one with"):
            largest_datastore(tmp_path / "none", "another tokenizer", prints[1])
