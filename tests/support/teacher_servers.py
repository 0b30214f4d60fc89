"""Servers of a teacher that run in threads: log-probs of a transformers model, in the forms of vLLM and SGLang."""

import dataclasses

import torch

from megatron_rc.launch.tasks.text import CharacterText
from tests.support.rollout_servers import Server


def with_hint(problem):
    """The problem with the first digit of its answer in front, for ``--teacher-prompt``."""
    return dataclasses.replace(problem, prompt=f"{problem.label[:1]}{problem.prompt}")


class TeacherAnswers(Server):
    """Answers as vLLM 0.32 and SGLang 0.5 document; ``model`` computes the log-probs, in float64.

    ``shows_text``: answers have the text of each token, by one token a digit.
    """

    model = None
    shows_text = True
    text = CharacterText("0123456789")

    def respond(self, path, body):
        """(status, answer) of one request; see :class:`Server`."""
        with self.lock:
            self.seen.append((path, body))
            fault = self.faults[path].pop(0) if self.faults.get(path) else None
        match path:
            case "/v1/models":
                answer = {"object": "list", "data": [{"id": "teacher", "object": "model"}]}
            case "/v1/completions":
                answer = self._completion(body)
            case "/get_model_info":
                answer = {"model_path": "teacher"}
            case "/generate":
                answer = self._generation(body)
        return 200, fault(answer) if fault else answer

    def _shown(self, token):
        return self.text.decode([token]) if self.shows_text else None

    def _log_probs(self, tokens):
        """[tokens - 1, v] of each token but the first."""
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)

    def _completion(self, body):
        tokens = body["prompt"]
        entries = [None]
        for token, log_probs in zip(tokens[1:], self._log_probs(tokens), strict=True):
            ranks = log_probs.argsort(descending=True).argsort() + 1
            shown = [token, *log_probs.topk(body["prompt_logprobs"]).indices.tolist()]
            entries.append(
                {
                    str(number): {
                        "logprob": float(log_probs[number]),
                        "rank": int(ranks[number]),
                        "decoded_token": self._shown(number),
                    }
                    for number in shown
                }
            )
        choice = {"index": 0, "text": "", "prompt_logprobs": entries, "prompt_token_ids": tokens, "token_ids": [0]}
        return {"model": body["model"], "choices": [choice]}

    def _generation(self, body):
        tokens = body["input_ids"]
        own = [[None, tokens[body["logprob_start_len"]], None]]
        tops = [None]
        first = body["logprob_start_len"] + 1
        for token, log_probs in zip(tokens[first:], self._log_probs(tokens)[first - 1 :], strict=True):
            own.append([float(log_probs[token]), token, self._shown(token)])
            top = log_probs.topk(body["top_logprobs_num"])
            tops.append([[value, number, None] for value, number in zip(*map(torch.Tensor.tolist, top), strict=True)])
        return {"text": "", "meta_info": {"id": "0", "input_token_logprobs": own, "input_top_logprobs": tops}}
