"""Settings declared once, on the parameters of a constructor or the fields of a dataclass: types, limits, choices.

    def __init__(self, steps: Annotated[int | None, Within(1, none="one call a token")] = None,
                 graph: Graph = AUTO, eta: Annotated[float, SHARE] = 0.0) -> None: ...

`register_to_config` reads the declarations: it refuses what they do not allow, and makes Python numbers of numpy's, so
that whatever draws can also be saved. A mark that is a function refuses what does not go with the other settings.
Dataclasses call `read_fields`, functions `whole`. The command line reads the declarations too (`settings_of`).

Settings that belong together are the fields of a frozen dataclass, declared there. A parameter of a constructor whose
default is such a dataclass takes a group; the configuration keeps its fields one by one, as files and the command line
write them (`in_groups` gathers them).
"""

import functools
import inspect
import math
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Within:
    """Limits of a number. Integers have no other; numbers are finite.

    Attributes:
        least, most: both are allowed; None: no limit.
        above: numbers are greater than this; None: no such limit.
        none: what None stands for, in words.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    none: str = ""

    def holds(self, number: float) -> bool:
        """Return whether a number is within."""
        return (
            (isinstance(number, int) or math.isfinite(number))  # an integer may be too large for a float
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
        )

    def __str__(self) -> str:
        if self.least is not None and self.least == self.most:
            return f"that is {_figure(self.least)}"
        if self.least is not None and self.most is not None:
            return f"from {_figure(self.least)} to {_figure(self.most)}"
        words = [] if self.least is None else [f"of at least {_figure(self.least)}"]
        words += [] if self.above is None else [f"above {_figure(self.above)}"]
        words += [] if self.most is None else [f"at most {_figure(self.most)}"]
        return " and ".join(words)


def _figure(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


@dataclass(frozen=True)
class OneOf:
    """The words that a setting may be.

    Attributes:
        names: the words.
    """

    names: Sequence[str]


@dataclass(frozen=True)
class Help:
    """What the command line says of a setting.

    Attributes:
        letter: stands for its value.
        text: in the list of options.
    """

    letter: str
    text: str


_KINDS = {bool, int, float, str, Sequence, Sequence[float], Mapping, type(None)}
MOST_CALLS = 65536  # what plans call after call is as long as the number of calls
COUNT = Within(1)
CALLS = Within(1, MOST_CALLS)
SHARE = Within(0, 1)
SEED = Within(0, 2**64 - 1)
Count = Annotated[int, COUNT]
Share = Annotated[float, SHARE]
AUTO = "auto"
# Refuses a setting by its name, its value and all settings of the constructor.
Check = Callable[[str, Any, Mapping[str, Any]], None]
Graph = Annotated[bool | int | str, OneOf((AUTO,)), Within(1, 64)]  # a number: calls of one graph, True is 1


@dataclass(frozen=True)
class DeclaredSetting:
    """One setting, as it is declared.

    Attributes:
        name: of the parameter.
        kinds: the types that a value may have; `type(None)` is one of them.
        within: the limits of numbers, also of those in a list.
        names: the words that are allowed; None: any.
        default: of the parameter.
        help: on the command line, if it is declared.
        checks: what refuses values beside other settings.
    """

    name: str
    kinds: tuple[object, ...]
    within: Within
    names: tuple[str, ...] | None
    default: object
    help: Help | None = None
    checks: tuple[Check, ...] = ()

    def read(self, value: object) -> Any:
        """Return the value with Python numbers in place of numpy's.

        Raises:
            ValueError: it is none of what the declaration allows; names the setting, the value and what is allowed.
        """
        plain = _plain(value)
        if not self._allows(plain):
            from visual_spec.files.reading import shortened

            raise ValueError(f"{self.name}={shortened(plain)}; pass {self.allowed}.")
        return plain

    @property
    def allowed(self) -> str:
        """Return what a value may be, in words."""
        limits = f" {self.within}" if str(self.within) else ""
        words: list[str] = []
        if int in self.kinds:
            words.append(f"an integer{limits}")
        if float in self.kinds:
            words.append(f"a finite number{limits}")
        if bool in self.kinds:
            words.append("True or False")
        if str in self.kinds:
            names = self.names or ()
            choice = repr(names[0]) if words and len(names) == 1 else f"one of {', '.join(names)}"
            words.append("a name" if self.names is None else choice)
        if self._listed:
            numbers = "numbers" if Sequence[float] in self.kinds else "integers"
            words.append(
                "a list of them" if int in self.kinds and numbers == "integers" else f"a list of {numbers}"
            )
        if Mapping in self.kinds:
            words.append("settings by name")
        if type(None) in self.kinds:
            words.append("None" + (f" for {self.within.none}" if self.within.none else ""))
        return ", or ".join(words)

    @property
    def _listed(self) -> bool:
        return Sequence in self.kinds or Sequence[float] in self.kinds

    def _allows(self, value: object) -> bool:
        if value is None:
            return type(None) in self.kinds
        if isinstance(value, bool):
            return bool in self.kinds
        if isinstance(value, int | float):
            fits = float in self.kinds or (int in self.kinds and isinstance(value, int))
            return fits and self.within.holds(value)
        if isinstance(value, str):
            return str in self.kinds and (self.names is None or value in self.names)
        if isinstance(value, list | tuple):
            kinds = int | float if Sequence[float] in self.kinds else int
            numbers = all(isinstance(one, kinds) and not isinstance(one, bool) for one in value)
            return self._listed and len(value) > 0 and numbers and all(map(self.within.holds, value))
        return isinstance(value, Mapping) and Mapping in self.kinds


def _plain(value: object) -> object:
    """The value with Python's numbers in place of numpy's."""
    import numpy as np  # the command line needs none

    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value


Made = TypeVar("Made")


@cache
def settings_of(init: Callable[..., None]) -> dict[str, DeclaredSetting]:
    """The settings that a constructor declares, by name; those of its groups one by one."""
    hints = get_type_hints(init, include_extras=True)
    parameters = list(inspect.signature(init).parameters.values())[1:]
    settings = [_setting(one, hints[one.name]) for one in parameters if one.name in hints]
    known = {one.name: one for one in settings if set(one.kinds) <= _KINDS}
    for group in groups_of(init).values():
        own = settings_of(type(group).__init__)
        known |= {name: replace(one, default=getattr(group, name)) for name, one in own.items()}
    return known


@cache
def groups_of(init: Callable[..., None]) -> dict[str, Any]:
    """The groups of settings that a constructor takes: their defaults, by the names of their parameters."""
    parameters = inspect.signature(init).parameters.values()
    return {one.name: one.default for one in parameters if is_dataclass(one.default)}


def in_groups(init: Callable[..., None], settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings that are written one by one as a constructor takes them: those of a group in its dataclass.

    A group that is there as a whole counts, and not its settings beside it.
    """
    left = dict(settings)
    for name, group in groups_of(init).items():
        taken = {one.name: left.pop(one.name) for one in fields(group) if one.name in left}
        whole = taken.get(name, left.get(name))
        if isinstance(whole, type(group)):
            left[name] = whole
        elif taken:
            left[name] = replace(group, **taken)
    return left


def of_settings(kind: Callable[..., Made], *args: object, **settings: object) -> Made:
    """An object of a class whose constructor takes groups, of settings that are written one by one."""
    return kind(*args, **in_groups(inspect.unwrap(kind.__init__), settings))


def one_by_one(init: Callable[..., None], arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a constructor with the settings of its groups in place of the groups."""
    groups = groups_of(init)
    flat = {name: value for name, value in arguments.items() if name not in groups}
    for name in groups.keys() & arguments.keys():
        flat |= {one.name: getattr(arguments[name], one.name) for one in fields(groups[name])}
    return flat


def _setting(parameter: inspect.Parameter, hint: object) -> DeclaredSetting:
    marks: list[object] = []
    kinds = tuple(_kinds(hint, marks))
    within = next((mark for mark in marks if isinstance(mark, Within)), Within())
    names = next((tuple(mark.names) for mark in marks if isinstance(mark, OneOf)), None)
    help = next((mark for mark in marks if isinstance(mark, Help)), None)
    checks: tuple[Any, ...] = tuple(filter(callable, marks))
    return DeclaredSetting(parameter.name, kinds, within, names, parameter.default, help, checks)


def _kinds(hint: object, marks: list[object]) -> list[object]:
    """The types of a declaration; its marks are appended to `marks`."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        marks += more
        return _kinds(inner, marks)
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part, marks)]
    if get_origin(hint) is Sequence and get_args(hint) != (int,):
        return [hint]  # of other lists nothing is known
    return [get_origin(hint) or hint]


_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD
Init = TypeVar("Init", bound=Callable[..., None])


def register_to_config(init: Init) -> Init:
    """Keep the arguments of an `__init__` in `self.config`, whether given by name or by position.

    diffusers treats settings given by position as defaults, and `from_config` then forgets them:
    `DDIMScheduler.from_config(DDIMScheduler(500).config)` has 1000 steps.

    Raises of the constructor:
        ValueError: a value that its declaration does not allow (`visual_spec.models.core.settings`).
    """
    from diffusers.configuration_utils import register_to_config as by_keyword  # the command line needs none

    signature, groups = inspect.signature(init), groups_of(init)

    def from_config(self: Any, **settings: object) -> None:
        own = {name: value for name, value in settings.items() if name in signature.parameters}
        init(self, **own | {name: group_of(type(one), self.config) for name, one in groups.items()})

    if groups:
        parts = [
            one.replace(name=name, default=value, kind=_BOTH)
            for one in signature.parameters.values()
            for name, value in one_by_one(init, {one.name: one.default}).items()
        ]
        from_config.__signature__ = signature.replace(parameters=parts)  # pyright: ignore[reportFunctionMemberAccess]
    registered = by_keyword(from_config if groups else init)

    @functools.wraps(init)
    def bound(self: object, *args: object, **kwargs: object) -> None:
        gathered = in_groups(init, kwargs)
        if gathered.keys() != kwargs.keys() or any(gathered[name] is not kwargs[name] for name in kwargs):
            names = ", ".join(f"{name}={type(one).__name__}(...)" for name, one in groups.items())
            warnings.warn(
                f"{type(self).__name__} takes groups of settings, {names}; single ones go with visual_spec 0.3.",
                DeprecationWarning,
                stacklevel=2,
            )
        given, declared = signature.bind(self, *args, **gathered), settings_of(init)
        for name in given.arguments.keys() & declared - groups.keys():
            given.arguments[name] = declared[name].read(given.arguments[name])
        arguments = one_by_one(init, given.arguments)
        given.apply_defaults()
        every = one_by_one(init, given.arguments)
        for name, setting in declared.items():
            for check in setting.checks:
                check(name, every[name], every)
        registered(**arguments)

    return cast(Init, bound)


def whole(name: str, value: object, within: Within = COUNT, note: str = "") -> int:
    """Return an integer within limits, of a function's argument; `note` is appended to the advice in the message.

    Raises:
        ValueError: it is none; names the argument, the value and what is allowed.
    """
    setting = DeclaredSetting(name, (int,), within, None, inspect.Parameter.empty)
    try:
        return setting.read(value)
    except ValueError as error:
        raise ValueError(f"{str(error)[:-1]}{note}.") from None


def read_fields(record: object) -> None:
    """Check the fields of a frozen dataclass by their declarations, as the settings of a constructor.

    Raises:
        ValueError: as `Setting.read`.
    """
    for name, setting in settings_of(type(record).__init__).items():
        object.__setattr__(record, name, setting.read(getattr(record, name)))


Group = TypeVar("Group")


def fields_of(*groups: type) -> tuple[str, ...]:
    """Return the names of the settings of such dataclasses."""
    return tuple(one.name for group in groups for one in fields(group))


def group_of(group: type[Group], config: Mapping[str, object]) -> Group:
    """Return the settings of a configuration that are fields of a dataclass."""
    return group(**{one.name: config[one.name] for one in fields(group)})  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------- what calls say of a token's law

LARGEST = 1e6  # guidance scale and temperature: products with logits stay finite in float32


@dataclass(frozen=True)
class LawSettings:
    """The settings of the law of a token that every call and command takes. `TokenLaw` is the law itself.

    A setting is declared here, with its limits, letter and help on the command line.

    Attributes:
        guidance_scale: `s` of classifier-free guidance, `unconditional + s * (conditional - unconditional)`
            (Ho and Salimans 2022, equation 6, in logits, with s = 1 + w). Guidance is active above 1. At 1 or below,
            the model's conditional law is used unchanged. At most 1e6.
        temperature: logits are divided by it; 0, or 1e-6 to 1e6. 0 is greedy decoding: all mass on the largest
            logit, and on the lowest id if several are equal.
        top_k: keep the `top_k` largest logits, and ties with the smallest of them. 0 is off.
        top_p: keep the smallest set of most probable tokens whose mass reaches `top_p`, and ties with the least
            probable of them (Holtzman et al. 2020, section 3.1). 1 is off.
        guidance_until: slots from this one on are drawn from the conditional law; None guides every slot. LlamaGen's
            `cfg_interval=n` guides its first token and n + 1 more, so it is `guidance_until=n + 2`.
    """

    guidance_scale: Annotated[float, Within(0, LARGEST), Help("S", "above 1: classifier-free guidance")] = 1.0
    temperature: Annotated[float, Within(0, LARGEST), Help("T", "0: greedy")] = 1.0
    top_k: Annotated[int, Within(0, 2**31 - 1), Help("K", "0: off")] = 0
    top_p: Annotated[float, Within(above=0, most=1), Help("P", "1: off")] = 1.0
    guidance_until: Annotated[
        int | None,
        Within(0, none="guidance of every slot"),
        Help("N", "tokens from the N-th on are drawn without guidance"),
    ] = None


LAW_SETTINGS = tuple(one.name for one in fields(LawSettings))
LAW_DEFAULTS = LAW_SETTINGS[:4]  # of which a pipeline saves defaults
