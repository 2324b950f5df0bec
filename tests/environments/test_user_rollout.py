"""A rollout function's parts are checked before anything trains on them."""

import asyncio

import numpy as np
import pytest
import torch

from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.user_rollout import UserRollout
from grpo_dist.types import Sampling
from tests.support import fakes
from tests.support.made_episodes import generated

TOKENIZER = character_tokenizer()
LAST = len(TOKENIZER) - 1


def sample(result):
    """Return the sample of a function that generates two tokens and returns ``result(first)``."""

    async def function(token_ids, generate):
        return result(await generate(token_ids))

    async def generate(ids, seed, sampling, most, *, stop):
        return generated([5, 6])

    rollout = UserRollout("mine:twice", function, {})
    (prompt,) = fakes.prompts(1)
    return asyncio.run(rollout.sample(prompt, 0, 1, Sampling(max_new_tokens=20), generate, TOKENIZER))


@pytest.mark.parametrize(
    "part", ["42", "tool said 42", b"ok", [-1], [LAST + 1], [2**40], [3.9], [True], [None], 7, None]
)
def test_a_given_part_that_is_no_list_of_tokens_is_refused_by_name(part):
    with pytest.raises(ValueError, match=r"function mine:twice: part 1 is .*; expected a list .*from 0 to"):
        sample(lambda first: [first, part])


@pytest.mark.parametrize("result", [lambda first: None, lambda first: first, lambda first: "text"])
def test_a_result_that_is_no_list_of_parts_is_refused_by_name(result):
    with pytest.raises(ValueError, match=r"function mine:twice returned .*; expected a list of `generate`'s"):
        sample(result)


@pytest.mark.parametrize(
    ("given", "stops"),
    [({}, ["."]), ({"stop": "</search>"}, ["</search>"]), ({"stop": ("a", "b")}, ["a", "b"])],
)
def test_a_stop_text_may_stand_alone(given, stops):
    asked = []

    async def function(token_ids, generate):
        return [await generate(token_ids, **given)]

    async def generate(ids, seed, sampling, most, *, stop):
        asked.append(list(stop))
        return generated([5, 6])

    (prompt,) = fakes.prompts(1)
    sampling = Sampling(max_new_tokens=20, stop=(".",))
    rollout = UserRollout("mine:once", function, {})
    asyncio.run(rollout.sample(prompt, 0, 1, sampling, generate, TOKENIZER))
    assert asked == [stops]


@pytest.mark.parametrize("tokens", [[0, LAST], (0, LAST), np.array([0, LAST]), torch.tensor([0, LAST]), []])
def test_given_tokens_may_be_any_sequence_of_integers(tokens):
    ids = sample(lambda first: [first, tokens]).completion_ids.tolist()
    assert ids == [5, 6, *([0, LAST] if len(tokens) else [])]
