import json
import subprocess
import sys
import threading
import time

import pytest

from ssd_pipe.errors import ModelError, RequestError
from ssd_pipe.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_fallback, byte_level

TEMPLATE = """{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{{ bos_token }}
{%- for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    [{{ m['role'] }}] {{ m['content'] | tojson }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
TALK = [
    {"role": "user", "content": "1 < 2 & ü\n"},
    {"role": "skip", "content": "x"},
    {"role": "assistant", "content": "yes"},
]


def folder_with(tmp_path, tokenizer, **settings):
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("where", ["setting", "named", "jinja", "json"])
def test_chat_is_rendered_as_transformers_renders_it(tmp_path, where):
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, byte_level())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    elif where == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    else:
        named = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        settings["chat_template"] = named if where == "named" else TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.load(folder)
    text = ours.render_chat(TALK)
    assert ours.encode_chat(TALK) == ours.backend.encode(text, add_special_tokens=False).ids
    assert text.startswith("<s>")
    assert text.endswith("[assistant]")
    theirs = AutoTokenizer.from_pretrained(folder)
    kwargs = {"chat_template": TEMPLATE} if where == "json" else {}
    assert text == theirs.apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=True, **kwargs
    )


def test_a_template_that_refuses_is_a_request_error(tmp_path):
    tokenizer = Tokenizer.load(folder_with(tmp_path, byte_level(), chat_template=TEMPLATE))
    with pytest.raises(RequestError, match=r"messages: .*no tools") as caught:
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])
    assert (caught.value.code, caught.value.field) == (400, "messages")
    with pytest.raises(RequestError, match="at least one"):
        tokenizer.encode_chat([])


def test_without_a_template_chat_is_a_request_error():
    with pytest.raises(RequestError, match=r"no chat template.*--raw") as caught:
        byte_level().encode_chat(TALK)
    assert caught.value.code == 400


def test_a_conversation_can_end_with_its_last_turn():
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    template += "{% if add_generation_prompt %}:{% endif %}"
    made = Tokenizer(byte_level().backend, template)
    turns = [{"role": "user", "content": "hi"}]
    assert made.render_chat(turns) == "<hi>:"
    assert made.render_chat(turns, generation_prompt=False) == "<hi>"
    with pytest.raises(RequestError, match="cannot set add_generation_prompt"):
        made.render_chat(turns, {"add_generation_prompt": False})


@pytest.mark.parametrize("trimmed", ["", " | trim"])
@pytest.mark.parametrize("content", ["hi", " two words  ", "", "a > b <b>", "hi hi"])
def test_a_last_message_goes_on_as_transformers_has_it(content, trimmed):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{% for m in messages %}<{{ m.content" + trimmed + " }}>{% endfor %}"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    [expected], _ = render_jinja_template(
        [turns], chat_template=template, continue_final_message=True
    )
    made = Tokenizer(byte_level().backend, template)
    assert made.render_chat(turns, None, False, continue_final_message=True) == expected
    assert turns[-1]["content"] == content


def test_a_last_message_that_the_template_does_not_keep_cannot_go_on():
    for shown in ("messages[0].content", "messages[1].content.split('.')[-1]"):
        made = Tokenizer(byte_level().backend, "{{ " + shown + " }}")
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a.b"}]
        with pytest.raises(RequestError, match="does not keep") as caught:
            made.render_chat(turns, None, False, continue_final_message=True)
        assert (caught.value.code, caught.value.field) == (400, "continue_final_message")


def test_a_long_prompt_keeps_no_other_thread_waiting():
    tokenizer, longest, ended = byte_level(), 0.0, threading.Event()

    def watch():
        nonlocal longest
        last = time.monotonic()
        while True:
            over = ended.wait(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            if over:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.monotonic()
    ids = tokenizer.encode("".join(chr(33 + i * i % 90) for i in range(1_500_000)))
    took = time.monotonic() - begun
    ended.set()
    watcher.join()
    assert len(ids) > 100_000
    assert longest < max(0.5 * took, 0.1)


def test_special_tokens_are_decoded_where_they_are_asked_for():
    made = byte_level()
    ids = made.encode("<s>hé")
    assert made.decode(ids) == "hé"
    assert made.decode(ids, special=True) == "<s>hé"


def test_names_of_tokens_and_of_what_is_none():
    made = byte_level()
    ids = made.encode("<s>é")
    names = made.names(ids)
    assert names[0] == "<s>"
    assert [made.backend.token_to_id(name) for name in names] == ids
    for wrong in (made.vocab_size, -1, 1 << 32, 1 << 70):
        with pytest.raises(RequestError, match=f"tokens: {wrong} is not the id of a token"):
            made.names([ids[0], wrong])


def test_bos_is_added_only_by_a_tokenizer_that_adds_it(tmp_path):
    plain, with_bos = byte_level(), byte_level(bos=True)
    assert with_bos.encode("the fox") == [1, *plain.encode("the fox")]
    assert 1 not in plain.encode("the fox")
    assert byte_fallback().decode(byte_fallback().encode("the fox")) == "the fox"


def test_stored_truncation_is_ignored(tmp_path):
    folder = folder_with(tmp_path, byte_level())
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert len(Tokenizer.load(folder).encode("the quick brown fox")) > 2


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", "{}"), ("tokenizer_config.json", "nope"), ("tokenizer_config.json", "[]")],
)
def test_a_broken_file_is_named(tmp_path, file, content):
    folder = folder_with(tmp_path, byte_level())
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=file):
        Tokenizer.load(folder)


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer: neither"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"no usable tokenizer: [^\n]*[^:\n]$"):
        Tokenizer.load(tmp_path)


def test_text_handling_imports_no_torch(tmp_path):
    folder = folder_with(tmp_path, byte_level(), chat_template=TEMPLATE)
    code = (
        "import sys, pathlib; from ssd_pipe.text.tokenizer import Tokenizer; import ssd_pipe.hub;"
        "import ssd_pipe.text.answer, ssd_pipe.text.detokenizer;"
        "t = Tokenizer.load(pathlib.Path(sys.argv[1])); t.encode('a');"
        "t.encode_chat([{'role': 'user', 'content': 'x'}]);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0
