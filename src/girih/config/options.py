"""Options as frozen dataclasses that check themselves, with the messages of :func:`girih.config.sections.build`."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar, Self, dataclass_transform

from girih.config.bounds import Bounds
from girih.config.sections import Redirecting, build, fields_of, hint_for, hints_of
from girih.errors import ConfigError


def integer(name: str, value: object, low: int = 1, high: float = math.inf) -> None:
    """Refuses values other than integers from ``low`` to ``high``, both included."""
    build(Annotated[int, Bounds(low, high)], value, name)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Options(Redirecting):
    """Base of options, from TOML or from Python. Subclasses are frozen dataclasses without a decorator.

    :func:`~girih.config.sections.build` checks each field by its annotation.

    Raises:
        ConfigError: a value that the annotation does not accept (names the option, the value and the expectation); an
            option that is unknown, missing or given without its name; or options that contradict each other.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]
    owner: ClassVar[str] = ""
    """The prefix of options' names in errors, for example ``table {self.name!r}: ``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __new__(cls, *given: object, **options: object) -> Self:
        """Refuses wrong arguments of ``__init__`` with our own message."""
        kind: type = cls
        known = fields_of(kind)
        for option in options:
            if option not in known:
                raise ConfigError(f"{cls.__name__}: unknown option {option!r}{hint_for(cls, option, known)}")
        if given:
            value = repr(given[0]) if isinstance(given[0], str | int | float) else "..."
            mend = f"write {cls.__name__}({next(iter(known))}={value})" if known else "it has no options"
            raise ConfigError(f"{cls.__name__}({value}): options need names; {mend}")
        for name, is_required in known.items() if options else ():  # copying passes no options
            if is_required and name not in options:
                raise ConfigError(
                    f"{cls.__name__}: option {name!r} is missing; write {cls.__name__}({name}=..., ...)"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        cls: type = type(self)
        hints = hints_of(cls)
        for field in dataclasses.fields(self):
            built = build(hints[field.name], getattr(self, field.name), f"{self._owner()}{field.name}")
            object.__setattr__(self, field.name, built)
        self._check()

    def _check(self) -> None:
        """Refuses options that do not fit together, and values that annotations cannot exclude."""

    def _owner(self) -> str:
        return self.owner.format(self=self)
