"""Templates that write the text of a message as it is are found, so that prompts need not be rendered one by
one.
"""

import pytest

from grpo_dist.chat.frames import writes_text_as_it_is
from grpo_dist.chat.template import REJECTED
from grpo_dist.data.prompts import PromptFormat
from tests.support.chat_templates import templated_tokenizer, trl_templates

AS_IT_IS = [
    "{{ '<|a|>' + message['role'] + '\n' + message['content'] + '<|b|>' }}",
    "{{ message.role ~ (message.content | trim) ~ '|' }}",
    "{% if loop.first and messages[0]['role'] != 'system' %}S{% endif %}{{ message['content'] }}",
    "{% if messages[loop.index0 - 1].role == 'user' %}U{% endif %}{{ message.content }}",
    "{% if (message.role == 'user') or message.tool_calls %}{{ message.content }}{% endif %}",
]
BY_TEXT = [
    "{{ message['content'].split('x')[-1] }}",
    "{{ message['content'] | upper }}",
    "{{ ('<' + message.content) | trim }}",
    "{% if 'x' in message.content %}1{% endif %}{{ message.content }}",
    "{% if message.content == 'x' %}1{% endif %}{{ message.content }}",
    "{% set text = message.content %}{{ text }}",
    "{% set text %}{{ message.content }}{% endset %}{{ text | upper }}",
    "{% for key in message %}{{ message[key] | upper }}{% endfor %}",
    "{% for key, value in message.items() %}{{ value | length }}{% endfor %}",
    "{{ message | tojson }}",
    "{% autoescape true %}{{ message.content }}{% endautoescape %}",
    "{{ message.content }}{{ loop.previtem.content | length }}",
    "{% macro write(text) %}{{ text | upper }}{% endmacro %}{{ write(message.content) }}",
    "{% set ns = namespace(m=message) %}{{ ns.m.content | length }}",
    "{{ message.content }}{{ messages | map(attribute='content') | join | length }}",
    "{% filter upper %}{{ message.content }}{% endfilter %}",
    "{{ message.content if message.content else 'nothing' }}",
    "{{ message.content[:3] }}",
    "{% if message %}{{ message.content",
]
PROBLEMS = [
    "1+1=", "  space \n\n", "\tx", "<think> {{ x }} {% y %}", "été\u2028", "a\\n'\"", "x" * 300, "</think>x",
]  # fmt: skip


@pytest.mark.parametrize("body", AS_IT_IS + BY_TEXT)
def test_it_is_known_whether_a_template_reads_the_text(body):
    assert writes_text_as_it_is(in_a_loop(body)) == (body in AS_IT_IS)


@pytest.mark.parametrize("name", sorted(trl_templates()))
def test_prompts_are_those_of_one_rendering_each(name):
    compare(templated_tokenizer(trl_templates()[name], "</s>", "<s>"))


def in_a_loop(body):
    return "{% for message in messages %}" + body + "{% endfor %}"


def compare(tokenizer):
    for settings in ({}, {"system_prompt": " Be brief. ", "instruction": "Box it.", "prefill": "<think>\n"}):
        prompt_format = PromptFormat(**settings)
        try:
            one_by_one = [prompt_format.text(problem, tokenizer) for problem in PROBLEMS]
        except (ValueError, *REJECTED):
            continue
        assert prompt_format.texts(PROBLEMS, tokenizer) == one_by_one
