"""Griffe extension: completes public names by the facts of docs_options.py, and rewrites roles of docstrings."""

from __future__ import annotations

import ast
from typing import Any

import griffe
from docs_options import REQUIRED, Option, options_of, path_of, plain_type, public_names, readable

KINDS = griffe.DocstringSectionKind


class Completed(griffe.Extension):
    """Gives a class the signature and the fields that it has with those of its bases, in plain types."""

    def __init__(self) -> None:
        self.public = {path_of(target): target for target in public_names().values() if callable(target)}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)
        options = options_of(self.public[obj.path]) if obj.path in self.public else []
        if options and isinstance(obj, griffe.Class | griffe.Function):
            given = [parameter(option, obj.module) for option in options]
            if isinstance(obj, griffe.Class):
                mark = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
                obj.set_member(
                    "__init__", griffe.Function("__init__", parameters=griffe.Parameters(*mark, *given))
                )
            else:
                obj.parameters = griffe.Parameters(*given)
            if obj.docstring:
                obj.docstring.parsed = sections(obj.docstring, options, given)


def parameter(option: Option, module: griffe.Module) -> griffe.Parameter:
    """Returns an option as a parameter whose type links to pages."""
    return griffe.Parameter(
        option.name,
        annotation=griffe.safe_get_annotation(
            ast.parse(plain_type(option.hint), mode="eval").body, parent=module
        ),
        kind=griffe.ParameterKind(option.kind.description),
        default=None if option.default is REQUIRED else repr(option.default),
    )


def sections(
    docstring: griffe.Docstring, options: list[Option], given: list[griffe.Parameter]
) -> list[griffe.DocstringSection]:
    """Returns the sections of a docstring, with all options where it has some of them."""
    parsed = docstring.parse("google", warnings=False)
    names = {option.name for option in options}
    fields = griffe.DocstringSectionParameters(
        [
            griffe.DocstringParameter(
                each.name,
                description=readable(option.meaning),
                annotation=each.annotation,
                value=each.default,
            )
            for option, each in zip(options, given, strict=True)
        ]
    )
    kept: list[griffe.DocstringSection] = []
    for section in parsed:
        if section.kind is KINDS.attributes:
            section.value = [each for each in section.value if each.name.rstrip(",") not in names]
        if section.kind is not KINDS.parameters and section.value:
            kept.append(section)
    is_text = [section.kind is KINDS.text for section in kept]
    place = is_text.index(False) if False in is_text else len(kept)
    return [*kept[:place], fields, *kept[place:]]
