"""TOML ⇄ frozen dataclasses, options of a run, and the config file as a whole."""

from girih.config.sections import (
    apply_override,
    build,
    check_call,
    classes_in,
    dropped_options,
    expand,
    located,
    parameter_hints,
    parse_toml,
    plain,
    read_toml,
    variables_in,
    with_overrides,
    write_toml,
)

__all__ = [
    "apply_override",
    "build",
    "check_call",
    "classes_in",
    "dropped_options",
    "expand",
    "located",
    "parameter_hints",
    "parse_toml",
    "plain",
    "read_toml",
    "variables_in",
    "with_overrides",
    "write_toml",
]
