"""A task with numbered prompts. Processes that score import this module, so it imports nothing large."""

CHARACTERS = "0123456789"


class Numbers:
    """A task whose prompts are the numbers of the problems; the reward is the share of even digits of a response."""

    characters = CHARACTERS
    max_response_length = 8

    def __init__(self, seed):
        pass

    def problems(self, start, count, held_out=False):
        from megatron_rc.launch.tasks import Problem

        return [Problem(f"{number:02d}") for number in range(start, start + count)]

    def reward(self, prompt, response, label, record):
        return sum(digit in "02468" for digit in response) / self.max_response_length
