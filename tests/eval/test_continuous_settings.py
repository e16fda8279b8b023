"""What is measured of models of continuous tokens: rivals and rules that suit the model, and what each of them is."""

from functools import partial
from typing import Any

import pytest

from tests.models.continuous.tiny import tiny_causal, tiny_mar
from visual_spec.eval.defaults import continuous_settings
from visual_spec.eval.quality.figures import kind_of
from visual_spec.eval.settings import parse_setting
from visual_spec.records import PipelineFacts
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import CONTINUOUS

LAW = TokenLaw(guidance_scale=2.0)
PAIR = {"drafter": ["module", "Class"]}


def settings_of(model: Any, index: Any = PAIR, plain: str = "continuous") -> Any:
    facts = PipelineFacts(
        "image", "tokens", (CONTINUOUS,), plain, "head-speculation", {"guidance_scale": 2.0}
    )
    return continuous_settings(facts, index, lambda part: dict(model.config))


def test_rivals_and_rules_of_a_masked_model():
    model = tiny_mar(grid_size=8, head_kind="velocity", head_steps=100)
    found = settings_of(model)
    assert found.plain == "continuous"
    assert found.controls == ("continuous:temperature=0.9", "continuous:seed=1000000")
    fewer, noise, still = "head_steps=50,last_head_steps=5", "final_noise=0.05", "eta=0,final_noise=0"
    aligned = [f"rule=aligned,tolerance={one}" for one in (0.05, 0.1, 0.2)]
    plain = ["steps=32", "steps=16", *(f"head_steps={one}" for one in (50, 25, 10, 5))]
    plain += [fewer, f"steps=32,{fewer}", f"steps=16,{fewer}", noise, still]
    rules = [f"rule=chain,{noise}", f"rule=path,{noise}", f"rule=ode,{still}", *aligned]
    assert found.others == (
        *(f"continuous:{text}" for text in plain),
        *(f"head-speculation:levels={levels}" for levels in (8, 16)),
        *(f"continuous-jacobi:{text}" for text in (rules[0], *aligned)),
        *(f"speculative-continuous:{text}" for text in (*rules, f"rule=cspd,{noise}", "rule=cspd-release")),
    )
    alone = settings_of(model, {}).others
    assert alone == tuple(text for text in found.others if not text.startswith("speculative"))


def test_settings_of_the_saved_sampler_stay():
    """The plain sampler of a folder may have a chain of its own."""
    model = tiny_mar(head_kind="velocity", final_noise=0.1)
    found = settings_of(model, plain="continuous:steps=12,head_steps=20")
    assert "continuous:steps=12,head_steps=10" in found.others
    assert "continuous:steps=12,head_steps=20,last_head_steps=5" in found.others
    assert "head-speculation:steps=12,head_steps=20,levels=16" in found.others
    assert "speculative-continuous:rule=chain,head_steps=20" in found.others
    assert not any("head_steps=25" in text or "steps=32" in text for text in found.others)


MODELS = {
    "mar": partial(tiny_mar, head_kind="velocity", head_steps=6),
    "mar, final noise": partial(tiny_mar, head_kind="velocity", head_steps=6, final_noise=0.1),
    "mar, eta 0": partial(tiny_mar, head_kind="velocity", head_steps=6, eta=0),
    "causal": partial(tiny_causal, head_kind="velocity", head_steps=6, final_noise=0.1),
    "causal, flow": partial(tiny_causal, head_kind="flow", head_steps=6),
    "causal, flow, eta": partial(tiny_causal, head_kind="flow", head_steps=6, eta=0.5, final_noise=0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_suits_the_model(name):
    model, drafter = MODELS[name](), MODELS[name](num_layers=1)
    known = settings_of(model)
    plain = parse_setting(known.plain, LAW, 0)
    measured = {"cspd", "cspd-release", "aligned"}
    laws = set()
    for text in (*known.controls, *known.others):
        setting = parse_setting(text, LAW, 0)
        sampler = setting.sampler
        parts = {"drafter": drafter} if sampler.needs_drafter else {}
        sampler.check(model, setting.law, 1, parts)  # refuses rules that the chain does not suit
        rule = sampler.config.get("rule")
        kind = kind_of(setting, plain)
        if text in known.controls:
            assert kind == "control"
        elif rule in measured or setting.sampler.law_settings != plain.sampler.law_settings:
            assert kind == "lossy"
        else:
            assert kind == "lossless"
        if kind != "control" and "tolerance" not in text and "cspd" not in text:
            laws.add(tuple(sampler.law_settings.items()))
    # What speculates exactly is compared with plain decoding of its own law.
    plain_laws = {
        tuple(parse_setting(text, LAW, 0).sampler.law_settings.items())
        for text in (known.plain, *known.others)
        if text.startswith("continuous:") or text == "continuous"
    }
    assert laws <= plain_laws
