"""An agent loop whose responses are the same in every run: they depend on the prompt and the session alone.

vLLM's samples depend on the number of servers, so runs with one rank and with two could not be compared otherwise.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class FixedRollouts(SingleTurnAgentLoop):
    """Answers N with "s+(N-s)" in session s: right where N - s is a digit, of other length where it is not."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        # Not by a method of verl's: 0.9.0 and 0.9.1 have different ones.
        prompt = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=False
        )
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        number, session = int(kwargs["reward_model"]["ground_truth"]), int(kwargs["session_id"])
        text = f"{session}+{number - session}"
        response_ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        step = int(kwargs["global_steps"])
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            response_logprobs=[-1.0] * len(response_ids),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": [], "min_global_steps": step, "max_global_steps": step},
        )
