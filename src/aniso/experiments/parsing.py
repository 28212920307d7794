"""A setting from plain data: the keys of a spec, or the options of a command."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from aniso.errors import AnisoError, UsageError, printable
from aniso.experiments.methods import Method
from aniso.experiments.settings import Setting
from aniso.experiments.strict_yaml import Document, refusal, validated
from aniso.registry import METHODS, SETTINGS


def parse_setting(document: Document, *, shared: Collection[str] = ()) -> Setting:
    """Return the setting that a document describes, checked; nothing heavy is imported.

    The keys of a document are those of the setting and of its method, side by side. A key that is neither is
    an error that names the nearest known one. ``shared`` keys belong to several cells of an experiment: they
    are left out where the method has no such option.
    """
    kind = document.data.get("setting")
    kind = SETTINGS.canonical(kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in SETTINGS:
        raise UsageError(
            "SPEC",
            f"{document.label}: there is no setting '{printable(kind)}'",
            line=document.lines.get(("setting",), ""),
            expected=", ".join(SETTINGS.names),
            fix=f"setting: {SETTINGS.names[0]}",
        )
    setting_class: type[Setting] = SETTINGS.get(kind)
    method_class = _method_class(setting_class, document)
    own: dict[str, object] = {}
    methods_own: dict[str, object] = {}
    for key, value in document.data.items():
        if key in setting_class.model_fields:
            own[key] = value
        elif key in method_class.model_fields:
            methods_own[key] = value
        elif key != "setting" and not (key in shared and _owners(setting_class, key)):
            raise _unknown_key(document, key, setting_class, method_class)
    try:
        method = validated(method_class, Document(document.label, methods_own, document.lines))
        setting = validated(setting_class, Document(document.label, own, document.lines))
        made = setting.model_copy(update={"method": method})
        made.check()
    except ValueError as e:
        raise refusal(
            document.label, document.lines.get(()), str(e), fix="change one of these options"
        ) from None
    except AnisoError as e:
        if e.code != "SPEC" and document.lines:  # it does not know where its value came from
            e.facts = {"spec": document.label, "line": document.lines.get((), ""), **e.facts}
        raise
    return made


def _method_class(setting_class: type[Setting], document: Document) -> type[Method]:
    name = document.data.get("method", setting_class.model_fields["method"].default)
    if not isinstance(name, str) or name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS.names, 1)
        raise refusal(
            document.label,
            document.lines.get(("method",)),
            f"there is no method '{printable(name)}'",
            key="method",
            expected=", ".join(setting_class.methods()),
            likely=f"did you mean '{near[0]}'?" if near else "",
            fix="choose one of these",
        )
    found: type[Method] = METHODS.get(name)
    return found


def _owners(setting_class: type[Setting], key: str) -> list[str]:
    """The methods of a setting that have an option of this name."""
    return [name for name in setting_class.methods() if key in METHODS.get(name).model_fields]


def _unknown_key(
    document: Document, key: str, setting_class: type[Setting], method_class: type[Method]
) -> UsageError:
    line = document.lines.get((key,))
    owners = _owners(setting_class, key)
    if owners:
        return refusal(
            document.label,
            line,
            f"'{printable(key)}' has no effect with method '{METHODS.name_of(method_class)}'",
            key=printable(key),
            expected=f"method {' or '.join(owners)}",
            fix=f"leave '{printable(key)}' out, or choose another method",
        )
    names = [*setting_class.model_fields, *method_class.model_fields]
    set_here = line is None and document.lines  # a spec's keys have lines
    near = difflib.get_close_matches(key.lower().replace("-", "_"), names, 1)
    return refusal(
        document.label,
        line,
        f"unknown key '{printable(key)}'{', as set on the command line' if set_here else ''}",
        key=printable(key),
        found=printable(key),
        expected=", ".join(names),
        likely=f"did you mean '{near[0]}'?" if near else "",
        fix=f"write '{near[0]}' in place of '{printable(key)}'" if near else "correct or remove the key",
    )
