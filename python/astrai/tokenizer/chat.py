"""Conversations to text, through the chat template that comes with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

    from astrai.tokenizer.tokenizer import Tokenizer

_DEFAULT, _TOOL_USE = "default", "tool_use"

Message = Mapping[str, Any]


class ChatTemplate:
    """The jinja templates of a model, run in an immutable sandbox.

    Templates come from model files and are not trusted: they cannot reach Python's internals or
    change what they are given. They may use `raise_exception(message)`, `strftime_now(format)`,
    the filter `tojson`, loop controls and the special tokens by name (`bos_token`, ...). The time
    and the memory that they take are not bounded: where models come from strangers, load them in a
    process that is.

    Control tokens that are spelled out inside a message are read as control tokens, as in
    transformers: a template's own markers and a user's cannot be told apart in the rendered text.
    Whoever passes on text of strangers and needs it inert has to remove them before.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """templates: one template, or several by name ("default", "tool_use"); may be empty."""
        self._sources = {_DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def available(self) -> bool:
        """Whether the model came with a template."""
        return bool(self._sources)

    @property
    def names(self) -> list[str]:
        """Names of the templates."""
        return list(self._sources)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        template_name: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Text of a conversation.

        messages               {"role": str, "content": str or list of text parts, ...}; the parts
                               {"type": "text", "text": str} of a content are joined
        add_generation_prompt  whether to end with the opening of the assistant's turn
        template_name          one of `names`; by default "tool_use" if tools are given and it
                               exists, else "default" or the only one
        tools, variables       handed to the template
        Raises ValueError: no template, an unknown template name, no messages, a malformed
               message, or an error that the template raises (with its own words).
        """
        import jinja2

        name = self._choose(template_name, has_tools=bool(tools))
        prepared = _prepare(messages)
        try:
            return self._template(name).render(
                **{
                    **self._special_tokens,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    **variables,
                    "messages": prepared,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateSyntaxError as problem:
            raise ValueError(
                f"chat template {name!r}: line {problem.lineno}: {problem.message}"
            ) from None
        except jinja2.TemplateError as problem:
            raise ValueError(f"chat template {name!r}: {problem}") from None
        # Whatever a template does with values of the wrong kind is the template's error.
        except (
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as problem:
            raise ValueError(
                f"chat template {name!r}: {type(problem).__name__}: {problem}"
            ) from problem

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: `render`, then tokens of exactly that text.

        BOS and EOS are the template's matter, so none is added: a template that writes BOS gives
        one, a template that does not gives none.
        """
        text = self.render(messages, add_generation_prompt, **variables)
        return tokenizer.encode(text, add_special_tokens=False)

    def _choose(self, wanted: str | None, has_tools: bool) -> str:
        if not self._sources:
            raise ValueError(
                "chat: the model has no chat template; expected one in its files. "
                "Send the prompt as plain text instead"
            )
        known = ", ".join(self._sources)
        if wanted is not None:
            if wanted not in self._sources:
                raise ValueError(f"chat: template_name {wanted!r}; expected one of {known}")
            return wanted
        if has_tools and _TOOL_USE in self._sources:
            return _TOOL_USE
        if _DEFAULT in self._sources:
            return _DEFAULT
        if len(self._sources) == 1:
            return next(iter(self._sources))
        raise ValueError(f"chat: none of the templates is 'default'; expected a name of {known}")

    def _template(self, name: str) -> jinja2.Template:
        template = self._compiled.get(name)
        if template is None:
            template = _environment().from_string(self._sources[name])
            self._compiled[name] = template
        return template


def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes for HTML, which models have not seen.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _prepare(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"chat: messages is a {type(messages).__name__}; expected a list")
    if not messages:
        raise ValueError("chat: messages is empty; expected at least one message")
    return [_prepare_message(message, index) for index, message in enumerate(messages)]


def _prepare_message(message: Message, index: int) -> dict[str, Any]:
    where = f"chat: messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is a {type(message).__name__}; expected a mapping")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has role {role!r}; expected a non-empty string")
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(
            f"{where} has a content of type {type(content).__name__}; "
            "expected a string or a list of text parts"
        )
    return {**message, "content": "".join(_part_text(part, where) for part in content)}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text") or not isinstance(text, str):
        raise ValueError(f"{where} has a content part of type {kind!r}; expected text parts")
    return text
