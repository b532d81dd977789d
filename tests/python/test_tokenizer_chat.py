"""Chat templates: where they come from, what they may do, and how errors read."""

from __future__ import annotations

import json

import pytest

from checkpoints import CHAT_TEMPLATE, write_tokenizer

HI = [{"role": "user", "content": "hi"}]
WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def template(source, **special):
    from astrai.tokenizer import ChatTemplate

    return ChatTemplate(source, special)


def read(directory):
    from astrai.tokenizer.hf import read_chat_template, read_tokenizer

    return read_tokenizer(directory), read_chat_template(directory)


def test_system_user_and_generation_prompt():
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    made = template(CHAT_TEMPLATE)
    body = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert made.render(messages) == body + "<|im_start|>assistant\n"
    assert made.render(messages, add_generation_prompt=False) == body


def test_rendering_equals_transformers(tmp_path):
    from transformers import AutoTokenizer

    source = (
        "{{ bos_token }}\n{%- for m in messages %}\n"
        "  {% if loop.index > 3 %}{% break %}{% endif %}\n"
        "{{ m['role'] }}: {{ m['content'] | trim }} {{ m | tojson }}{% endfor %}\n"
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ extra }}"
    )
    write_tokenizer(tmp_path, chat_template=source, tokenizer_class="PreTrainedTokenizerFast")
    messages = [{"role": "user", "content": " <é> & 'x' "}, {"role": "assistant", "content": "y"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages * 2, tokenize=False, extra="E")
    _, mine = read(tmp_path)
    assert mine.render(messages * 2, False, extra="E") == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 'a' * (10 ** 17) }}",
    ],
    ids=["endless recursion", "nesting", "more text than memory"],
)
def test_templates_that_overreach_are_refused(source):
    with pytest.raises(ValueError, match="chat template 'default'"):
        template(source).render(HI)


def test_exactly_one_bos_from_a_template_that_writes_it(tmp_path):
    write_tokenizer(tmp_path, chat_template=WITH_BOS, add_bos_token=True)
    tokenizer, made = read(tmp_path)
    ids = made.encode(tokenizer, HI)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>[user] hi"


def test_a_template_without_bos_stays_as_rendered(tmp_path):
    write_tokenizer(tmp_path, add_bos_token=True)
    tokenizer, made = read(tmp_path)
    ids = made.encode(tokenizer, HI)
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == made.render(HI)


def test_control_text_in_a_message_is_read_as_control_tokens(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer, made = read(tmp_path)
    ids = made.encode(tokenizer, [{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 2


def test_no_template_says_so(tmp_path):
    write_tokenizer(tmp_path, chat_template=None)
    _, made = read(tmp_path)
    assert not made.available
    with pytest.raises(ValueError, match="the model has no chat template"):
        made.render(HI)


def test_named_templates(tmp_path):
    entries = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools:{{ tools | length }}"},
        {"name": "rag", "template": "rag"},
    ]
    write_tokenizer(tmp_path, chat_template=entries)
    _, made = read(tmp_path)
    assert made.names == ["default", "tool_use", "rag"]
    assert made.render(HI) == "plain"
    assert made.render(HI, tools=[{"type": "function"}]) == "tools:1"
    assert made.render(HI, template_name="rag") == "rag"
    with pytest.raises(ValueError, match="template_name 'x'; expected one of default, tool_use"):
        made.render(HI, template_name="x")
    assert template({"only": "one"}).render(HI) == "one"
    with pytest.raises(ValueError, match="none of the templates is 'default'"):
        template({"a": "1", "b": "2"}).render(HI)


def test_a_separate_file_wins(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file:{{ messages[0].content }} é", "utf-8")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("rag")
    _, made = read(tmp_path)
    assert made.render(HI) == "file:hi é"
    assert made.render(HI, template_name="rag") == "rag"


@pytest.mark.parametrize("value", [3, {"name": "x"}, [{"name": "x"}], ["x"]])
def test_a_malformed_entry_names_the_file(tmp_path, value):
    write_tokenizer(tmp_path, chat_template=value)
    with pytest.raises(ValueError, match=r"tokenizer_config.json: chat_template"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("{{ messages[9].content.x }}", "undefined|no element|list"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ nothing() }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% for i in range(10000000) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_errors_of_a_template_become_one_value_error(source, named):
    with pytest.raises(ValueError, match=f"chat template 'default'.*{named}"):
        template(source).render(HI)


def test_messages_are_not_changed_by_a_template():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    before = json.dumps(messages)
    assert template("{{ messages[0].content }}").render(messages) == "ab"
    assert json.dumps(messages) == before


def test_a_call_of_tools_needs_no_content():
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert template("[{{ messages[0].content }}]").render([message]) == "[]"


def test_time_is_available():
    text = template("{{ strftime_now('%Y') }}").render(HI)
    assert len(text) == 4
    assert text.isdigit()


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([*HI, {"role": "", "content": "x"}], r"messages\[1\] has role ''"),
        ([{"role": "user"}], "content of type NoneType"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "part of type 'text'"),
    ],
)
def test_malformed_messages_are_refused_by_position(messages, named):
    with pytest.raises(ValueError, match=named):
        template(CHAT_TEMPLATE).render(messages)
