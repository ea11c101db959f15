"""Reasoning, then </think>answer: DeepSeek-R1 and models that were distilled from it.

Their reasoning begins without a tag, as templates write <think> at the end of the prompt, or leave it to the model, which may
forget it.
"""

from __future__ import annotations

from distmk.text.output.families import family
from distmk.text.output.reasoning.qwen3 import CLOSE, Qwen3


@family("deepseek_r1")
class DeepSeekR1(Qwen3):
    @classmethod
    def fits(cls, template: str) -> bool:
        return CLOSE in template and cls.is_deepseek(template)

    def begins_inside(self) -> bool:
        return not self.prompt_end.endswith(CLOSE)
