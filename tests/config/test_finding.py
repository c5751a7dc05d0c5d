"""Facts of settings: the same in each class of a section, and what they add up to."""

from collections import defaultdict
from dataclasses import fields

from adloco.config.finding import aliases, held_by, setting_facts
from adloco.config.sections import SECTIONS
from adloco.run.stored import changeable
from adloco.setting import Facts, facts_of


def test_a_setting_of_several_classes_has_the_same_facts_in_each() -> None:
    """A run may change `inner.lr` on resume whichever optimizer it has."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for section, content in SECTIONS.items():
        chosen = content.choice.register.classes.values() if content.choice else ()
        for owner in (*chosen, *content.parts.values()):
            for field in fields(owner):
                found[f"{section}.{field.name}"].append(facts_of(field))
    several = {name: facts for name, facts in found.items() if len(facts) > 1}
    assert {"inner.lr", "inner.betas"} <= several.keys()
    assert [name for name, facts in several.items() if len({*facts}) > 1] == []


def test_what_may_change_on_resume() -> None:
    free = {name for name, facts in setting_facts().items() if facts.resume == "free"}
    kept = ("recorded", "grows")
    recorded = {name for name, facts in setting_facts().items() if facts.resume in kept}
    assert {"run.tokens", "data.path", "outer.on_host", "switch.pass_limit"} <= free
    assert {"inner.lr", "method.max_grad_norm", "data.skip_samples"} <= recorded
    assert {*changeable()} == (free | recorded) - {"run.folder", "run.name"}
    assert "inner.weight_decay" not in changeable()


def test_what_arms_must_share() -> None:
    assert held_by("run.tokens") == "budget"
    assert held_by("model.hidden_size") == held_by("model.of_my_own_class") == "model"
    assert held_by("model.gradient_checkpointing") == held_by("inner.lr") == ""


def test_no_alias_stands_for_two_settings() -> None:
    given = [alias for facts in setting_facts().values() for alias in facts.aliases]
    assert sorted(given) == sorted(aliases())
