"""A folder on the Hub, over a server on this machine: what arrives, what does not, and every way it can break.

The way over Git LFS (FACTS 19); that over Xet needs the Hub itself.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama, tiny_tlm
from tinylm import cli
from tinylm.data.prepare import write_store
from tinylm.data.sources import open_source
from tinylm.data.token_store import TokenStore
from tinylm.publish.preflight import check_destination
from tinylm.publish.push import push_finished, push_folder

from .conftest import TOKEN
from .hub_server import HubServer, Repository

RUNS_OWN = ["STATUS", "run.json", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "notes.txt"]
RUNS_OWN += ["training_args.bin", "secret.py", "wandb/run/log.txt", "checkpoint-3/model.safetensors", "answers.json"]
RUNS_OWN += ["phases/.rank-0", "audit-rank-0.npy", "tensorboard/events", "pytorch_model.bin"]

# An environment without tinylm, as on somebody else's machine: the import fails as if it had never been installed.
ELSEWHERE = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tinylm":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

ids = torch.arange(3, 30)[None]
model = AutoModelForCausalLM.from_pretrained("me/tlm", trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained("me/tlm")
adapted = AutoPeftModelForCausalLM.from_pretrained("me/adapter").eval()
results = {"tlm": model(ids).logits, "adapter": adapted(ids).logits, "ids": torch.tensor(tokenizer("né")["input_ids"])}
torch.save({name: result.detach() for name, result in results.items()}, "results.pt")
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run, with everything that a run leaves behind."""
    folder = tmp_path / "tlm"
    tiny_tlm().save_pretrained(folder)
    byte_tokenizer(eos_token=START).save_pretrained(folder)
    for name in RUNS_OWN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1234, "best_model_checkpoint": str(folder)}))
    (folder / "all_results.json").write_text('{"eval_loss": 1.5}')
    (folder / "loss.png").write_bytes(b"\x89PNG a chart")
    (folder / "README.md").write_text(
        '---\ntags:\n- tinylm\n---\n\n# tlm\n\n`pipeline("x", "tlm")`, `tinylm chat tlm`\n'
    )
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter that calls its base `me/base`."""
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    adapted = get_peft_model(tiny_llama(), settings)
    adapted.peft_config["default"].base_model_name_or_path = "me/base"
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()  # PEFT's, whose head names nothing
    return tmp_path / "adapter"


def held(hub: HubServer, repo_id: str, kind: str = "model") -> dict[str, bytes]:
    return {name: data for name, data in hub.repositories[kind, repo_id].files.items() if name != ".gitattributes"}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(folder: Path, **settings: object) -> str:
    """What a push says that fails; nothing has changed in the folder, and no token is in the message."""
    before = snapshot(folder)
    with pytest.raises((ValueError, ConnectionError)) as refused:
        push_folder(folder, "me/tlm", **settings)
    assert snapshot(folder) == before and TOKEN not in str(refused.value)
    return str(refused.value)


def test_what_is_meant_to_be_sent_arrives_and_nothing_else(hub: HubServer, run: Path) -> None:
    said = push_folder(run, "tlm")
    files = held(hub, "me/tlm")
    expected = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    expected |= {"modeling_tlm.py", "configuration_tlm.py", "README.md", "loss.png", "all_results.json"}
    assert files.keys() == expected
    for name in expected - {"README.md"}:
        assert files[name] == (run / name).read_bytes(), name
    repository = hub.repositories["model", "me/tlm"]
    assert repository.private and f"{hub.url}/me/tlm (private, commit {repository.sha[:12]})" in said
    assert repository.commits == ["initial commit", f"tinylm {importlib.metadata.version('tinylm')}, step 1,234"]
    assert hub.asked("PUT", "/part/2$") and hub.asked("PUT", "/lfs/\\w+$")  # in parts, and in one piece
    assert '`pipeline("x", "me/tlm")`, `tinylm chat me/tlm`' in files["README.md"].decode()


def test_code_travels_with_what_it_imports_from_beside_it(hub: HubServer, run: Path) -> None:
    code = run / "modeling_tlm.py"
    code.write_text(code.read_text() + "\nfrom .rotary import turn\n")
    (run / "rotary.py").write_text("turn = None\n")
    push_folder(run, "me/tlm")
    assert {"modeling_tlm.py", "rotary.py"} <= held(hub, "me/tlm").keys()
    assert "secret.py" not in held(hub, "me/tlm")


def test_a_second_push_replaces_the_first_and_one_from_elsewhere_does_not(
    hub: HubServer, run: Path, adapter: Path
) -> None:
    push_folder(run, "me/tlm", private=False)
    assert not hub.repositories["model", "me/tlm"].private
    assert json.loads((run / "pushed.json").read_text()) == {
        "repo_id": "me/tlm",
        "commit": hub.repositories["model", "me/tlm"].sha,
    }
    (run / "loss.png").unlink()
    push_folder(run, "me/tlm", private=False)
    assert "loss.png" not in held(hub, "me/tlm") and "pushed.json" not in held(hub, "me/tlm")
    commits = list(hub.repositories["model", "me/tlm"].commits)
    push_folder(run, "me/tlm", private=False)
    assert hub.repositories["model", "me/tlm"].commits == commits  # nothing had changed
    assert "is taken" in refusal(adapter, private=False)
    push_folder(adapter, "me/tlm", private=False, overwrite=True)
    assert "adapter_config.json" in held(hub, "me/tlm") and "config.json" not in held(hub, "me/tlm")


def test_an_adapter_names_its_base_by_an_id_of_the_hub(hub: HubServer, adapter: Path) -> None:
    """Case E3."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    for base in (str(adapter.parent / "base"), "package:some/model.gguf", None):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
        said = refusal(adapter)
        assert f"calls its base model `{base}`" in said and "`--base_model_id" in said and hub.requests == []
    (adapter / "README.md").write_text("---\ntags: [tinylm]\n---\n\nAn adapter of the local model `base`.\n")
    push_folder(adapter, "me/adapter", base_model_id="me/base")
    files = held(hub, "me/adapter")
    assert json.loads(files["adapter_config.json"]) == {**config, "base_model_name_or_path": "me/base"}
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "me/base" and card.text.strip() == "An adapter of `me/base`."
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("README.md", "---\ntags: [a]\n---\nfrom /home/me/runs/x\n", "in line 4 a path of this machine, `/home/me/"),
        ("all_results.json", '{"base": "C:\\\\Users\\\\me"}', "a path of this machine"),
        ("all_results.json", '{"of": "/Users/me"}', "`/Users/me`"),  # there is no such folder here
        ("config.json", '{"model_type": "tlm", "_name_or_path": "/tmp/base"}', "`/tmp/base`"),
        ("config.json", '{"model_type": "tlm", "_name_or_path": "/gpfs/me/base"}', "`/gpfs/me/base`"),
        ("README.md", "---\ntags: [a]\n---\nfrom ~/runs\n", "`~/runs`"),
        ("README.md", f"---\ntags: [a]\n---\n\n{TOKEN}\n", "in line 5 what looks like a token or key"),
        ("all_results.json", '{"key": "hf_AbCdEfGhIjKlMnOpQrStUv"}', "looks like a token"),
        ("all_results.json", json.dumps({"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567"}), "looks like a token"),
    ],
)
def test_a_path_of_this_machine_or_a_token_is_not_sent(
    name: str, text: str, said: str, hub: HubServer, run: Path
) -> None:
    (run / name).write_text(text)
    message = refusal(run)
    assert f"`{name}` holds" in message and said in message and hub.requests == []
    assert "hf_AbC" not in message and "0123456789" not in message


def test_the_token_in_use_is_not_sent_whatever_it_looks_like(hub: HubServer, run: Path) -> None:
    (run / "all_results.json").write_text('{"note": "an ordinary word"}')
    assert "looks like a token" in refusal(run, token="ordinary") and hub.requests == []


def test_what_looks_a_little_like_a_path_or_a_key_is_sent(hub: HubServer, run: Path) -> None:
    words = "https://host/home/me/x, me/tlm, /chat/completions, 1~/2, q/k/v, nats / token, <s></s>"
    words += ", commit 0123456789abcdef0123456789abcdef01234567"
    (run / "README.md").write_text(f"---\ntags: [a]\n---\n\n{words}\n")
    push_folder(run, "me/tlm")
    assert words in held(hub, "me/tlm")["README.md"].decode()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("not there", "There is no folder"),
        ("empty", "holds nothing"),
        ("cut off", "is cut off or damaged"),
        ("pickled", "which can run any code"),
        ("no weights", "lacks the weights"),
        ("part missing", "lacks model-00002-of-00002.safetensors"),
        ("license", "knows no licence `my-own`"),
        ("head", "no YAML that the Hub reads"),
        ("base", "`base_model` in `README.md`"),
    ],
)
def test_a_folder_that_is_not_in_order_is_refused(
    fault: str, said: str, hub: HubServer, run: Path, tmp_path: Path
) -> None:
    weights = run / "model.safetensors"
    if fault == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif fault in ("pickled", "no weights"):
        weights.unlink()
    elif fault == "part missing":
        weights.rename(run / "model-00001-of-00002.safetensors")
        parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (run / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    if fault == "no weights":
        for path in run.glob("*.*t*"):
            if path.suffix in (".pt", ".pth", ".bin"):
                path.unlink()
        (run / "pytorch_model.bin").unlink()
        (run / "training_args.bin").unlink()
    heads = {"license": "license: my-own", "head": "tags: [a", "base": "base_model: /some/where/else"}
    if fault in heads:
        (run / "README.md").write_text(f"---\n{heads[fault]}\n---\n\ntext\n")
    folder = {"not there": tmp_path / "nowhere", "empty": tmp_path / "empty"}.get(fault, run)
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        push_folder(folder, "me/tlm")
    assert said in str(refused.value) and not hub.repositories


def test_what_passes_is_waited_for_and_the_push_goes_through(hub: HubServer, run: Path, waits: list[float]) -> None:
    """429 as long as it asks, 5xx and broken connections a little longer each time; one commit in the end."""
    hub.fail("POST", "/create", status=429, Retry_After="77")
    hub.fail("POST", "/validate-yaml", status=502)
    hub.fail("PUT", "/lfs/", cut="during", times=2)
    hub.fail("PUT", "/lfs/", status=503)
    hub.fail("POST", "/lfs/verify", status=500)
    hub.fail("POST", "/commit/", cut="during")
    push_folder(run, "me/tlm")
    assert waits[0] == 77 and 15 in waits and 45 in waits
    assert held(hub, "me/tlm")["model.safetensors"] == (run / "model.safetensors").read_bytes()
    assert len(hub.repositories["model", "me/tlm"].commits) == 2


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: HubServer, run: Path, waits: list[float]) -> None:
    push_folder(run, "me/tlm")
    (run / "loss.png").unlink()  # to be deleted there, which cannot be done twice
    (run / "all_results.json").write_text("{}")
    hub.fail("POST", "/commit/", cut="after")
    push_folder(run, "me/tlm")
    assert len(hub.repositories["model", "me/tlm"].commits) == 3 and waits == [5]
    push_folder(run, "me/tlm")
    assert len(hub.repositories["model", "me/tlm"].commits) == 3


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/create", 401, "invalid or expired"),
        ("/create", 403, "not allowed to this token: the Hub answers 403 (quota of ***)"),
        ("/preupload/", 403, "not allowed to this token"),
        ("/commit/", 412, "met another change to the repository"),
        ("/commit/", 413, "the Hub answers 413 (quota of ***)"),
    ],
)
def test_a_refusal_is_said_at_once_and_the_push_can_be_repeated(
    path: str, status: int, said: str, hub: HubServer, run: Path, waits: list[float]
) -> None:
    hub.fail("POST", path, status=status, message=f"quota of {TOKEN}")
    message = refusal(run)
    assert said in message and "`me/tlm`" in message and waits == []
    assert not held(hub, "me/tlm") if hub.repositories else True
    uploaded = len(hub.objects)
    before = hub.asked("PUT", "/lfs/")
    push_folder(run, "me/tlm")
    assert held(hub, "me/tlm") and (hub.asked("PUT", "/lfs/") == before) == (uploaded > 0)


def test_a_hub_that_keeps_failing_ends_the_push_in_one_paragraph(hub: HubServer, run: Path, waits: list[float]) -> None:
    hub.fail("PUT", "/lfs/", cut="during", times=10_000)
    said = refusal(run)
    assert "The push to `me/tlm` failed: no answer" in said and {5, 15, 45, 135} <= set(waits)
    hub.faults.clear()
    push_folder(run, "me/tlm")


def test_a_push_that_fails_after_a_run_does_not_fail_the_run(
    hub: HubServer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case E7."""
    caplog.set_level("INFO", "tinylm")
    there = check_destination("me/tlm", private=False)
    hub.fail("POST", "/commit/", status=403)
    push_finished(run, there)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"The run is finished and saved in {run}, and was not pushed: ")
    assert warning.endswith(f"Push it with: tinylm push {run} --repo_id me/tlm --public")
    push_finished(run, there)
    assert f"to {hub.url}/me/tlm (public" in caplog.text and held(hub, "me/tlm")


def test_a_tokenizer_and_a_prepared_corpus_can_be_pushed_and_read(hub: HubServer, tmp_path: Path) -> None:
    byte_tokenizer(eos_token=START).save_pretrained(tmp_path / "tokenizer")
    one_file = tmp_path / "all.jsonl"
    one_file.write_text("".join(json.dumps({"text": f"text {n} " * 20}) + "\n" for n in range(30)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    write_store(open_source(data_files=[str(one_file)]), tokenizer, tmp_path / "corpus")
    push_folder(tmp_path / "tokenizer", "tokens")
    push_folder(tmp_path / "corpus", "corpus")
    assert held(hub, "me/tokens").keys() == {"tokenizer.json", "tokenizer_config.json", "README.md"}
    files = held(hub, "me/corpus", "dataset")
    assert str(tmp_path) not in files["manifest.json"].decode() and "from: `all.jsonl`" in files["README.md"].decode()
    for name, data in files.items():
        path = tmp_path / "arrived" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sent, arrived = TokenStore.open(tmp_path / "corpus"), TokenStore.open(tmp_path / "arrived")
    assert sent.counts == arrived.counts
    for ours, theirs in zip(sent.tokens("train"), arrived.tokens("train"), strict=True):
        assert np.array_equal(ours, theirs)


def test_what_was_pushed_loads_in_an_empty_environment_with_the_same_logits(
    hub: HubServer, run: Path, adapter: Path, tmp_path: Path
) -> None:
    """Case E12: from the server, in a process without tinylm, the code that travelled with it; and an adapter."""
    tiny_llama().save_pretrained(tmp_path / "base")
    for folder, name in ((run, "tlm"), (adapter, "adapter"), (tmp_path / "base", "base")):
        push_folder(folder, f"me/{name}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(elsewhere), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    command = [sys.executable, "-I", "-c", ELSEWHERE]
    done = subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    results, ids = torch.load(elsewhere / "results.pt", weights_only=True), torch.arange(3, 30)[None]
    torch.testing.assert_close(results["tlm"], tiny_tlm()(ids).logits, atol=1e-6, rtol=0)
    assert results["ids"].tolist() == byte_tokenizer(eos_token=START)("né")["input_ids"]
    from peft import PeftModel

    expected = PeftModel.from_pretrained(tiny_llama(), adapter).eval()(ids).logits
    torch.testing.assert_close(results["adapter"], expected, atol=1e-6, rtol=0)
    assert not torch.allclose(expected, tiny_llama()(ids).logits)


def test_the_command_says_where_it_went_or_why_not(
    hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.runs, "quieten", lambda: None)  # what it does stays done in this process

    def tinylm(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tinylm", "push", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
            sys.exit(0)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    code, said, _ = tinylm(run, "--repo_id", "tlm", "--data_license", "cc-by-sa-4.0")
    assert code == 0 and said.startswith("Pushed 10 files to ") and said.count("\n") == 1
    assert ModelCard(held(hub, "me/tlm")["README.md"].decode()).data.license == "cc-by-sa-4.0"
    hub.repositories["model", "me/tlm"] = Repository(private=True, files={"a": b"b"})
    code, said, error = tinylm(run, "--repo_id", "tlm")
    assert code == 2 and said == "" and error.count("\n") == 1 and "`--overwrite`" in error.replace("tinylm push ", "")
    assert tinylm(run, "--repo_id", "tlm", "--overwrite")[0] == 0 and "a" not in held(hub, "me/tlm")
    code, said, error = tinylm(run, "--repo_id", "no/such/name")
    assert code == 2 and said == "" and error.count("\n") == 1 and "is no name for a repository" in error
    assert tinylm(run, "--repo_id", "team/tlm", "--public")[0] == 0
    assert not hub.repositories["model", "team/tlm"].private
