"""Prompts as tokens: characters, and the tokenizers of Hugging Face directories with and without a chat template."""

import json

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks import Problem
from megatron_rc.launch.tasks.text import CharacterText, HuggingFaceText

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}[assistant]"
PROBLEM = Problem("4 + 5 = ?\n", 9, (("1 + 2 = ?\n", "3"),))


def tokenizer_folder(folder, *, template=TEMPLATE, eos="</s>", pad="<pad>", bos=None, appends_end=False):
    """A byte-level tokenizer as a model directory has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<pad>", "<s>", "</s>"])
    from tokenizers import decoders, processors

    inner.decoder = decoders.ByteLevel()
    if bos or appends_end:
        inner.post_processor = processors.TemplateProcessing(
            single=" ".join(["<s>"] * bool(bos) + ["$A"] + ["</s>"] * appends_end),
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, pad_token=pad, bos_token=bos)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def test_code_beside_a_tokenizer_is_neither_run_nor_asked_about(tmp_path, capsys):
    path = tokenizer_folder(tmp_path) / "tokenizer_config.json"
    mark = tmp_path / "was here"
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    (tmp_path / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Own: pass\n")
    with pytest.raises(ConfigurationError, match=f"{tmp_path} .* code .* never run") as error:
        HuggingFaceText(tmp_path, chat=False)
    assert "\n" not in str(error.value)
    assert not mark.exists()
    assert capsys.readouterr().out == ""


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_once(tmp_path):
    text = HuggingFaceText(tokenizer_folder(tmp_path, bos="<s>", template="<s>" + TEMPLATE), chat=False)
    assert text.encode(PROBLEM).count(1) == 1
    chat = HuggingFaceText(tmp_path, chat=True)
    assert chat.encode(PROBLEM).count(1) == 1


def test_a_tokenizer_that_appends_its_end_token_ends_no_prompt_with_it(tmp_path):
    """As with add_eos_token; an end that the prompt itself spells stays, and so does the token at the beginning."""
    text = HuggingFaceText(tokenizer_folder(tmp_path, bos="<s>", appends_end=True), chat=False)
    assert text.tokenizer.encode("ab")[-1] == text.eos, "the tokenizer appends it"
    plain = HuggingFaceText(tokenizer_folder(tmp_path / "plain", bos="<s>"), chat=False)
    for prompt, ends in (("ab", 0), ("ab</s>", 1), ("</s>", 1), ("a</s>b</s></s>", 2)):
        ids = text.encode(Problem(prompt))
        assert ids == plain.encode(Problem(prompt))
        assert ids[0] == 1
        assert ids[len(ids) - ends :] == [text.eos] * ends
    chat = HuggingFaceText(tmp_path, chat=True)
    assert chat.encode(Problem("ab")) == HuggingFaceText(tmp_path / "plain", chat=True).encode(Problem("ab"))
    assert text.observed("ab") == plain.observed("ab")


# In the style of models that think unless they are told not to, and that write the tools before the conversation.
THINKING = """
{%- if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}</s>{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- if style %}({{ style.name }}){% endif %}{% endif %}"""
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def test_a_chat_template_gets_its_variables_and_the_tools(tmp_path):
    text = HuggingFaceText(tokenizer_folder(tmp_path, template=THINKING), chat=True)
    asked = Problem("4 + 5")
    assert text.shown(asked) == "[user]4 + 5</s>[assistant]"
    text.use_template_kwargs('{"enable_thinking": false, "style": {"name": "brief"}}')
    assert text.shown(asked) == "[user]4 + 5</s>[assistant]<think></think>(brief)"
    text.use_template_kwargs('{"enable_thinking": true}')
    shown = text.shown(Problem("4 + 5", tools=(SEARCH,)))
    begin, _, rest = shown.partition("</s>")
    assert json.loads(begin.removeprefix("[tools]")) == SEARCH
    assert rest == "[user]4 + 5</s>[assistant]"


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "messages", "chat_template"])
def test_variables_that_the_program_decides_are_refused(tmp_path, name):
    text = HuggingFaceText(tokenizer_folder(tmp_path, template=THINKING), chat=True)
    with pytest.raises(ConfigurationError, match=f"--chat-template-kwargs .*: {name} is decided"):
        text.use_template_kwargs(json.dumps({name: True}))


def test_variables_that_no_template_reads_are_refused(tmp_path):
    """Jinja ignores them in silence, a misspelled one too."""
    text = HuggingFaceText(tokenizer_folder(tmp_path, template=THINKING), chat=True)
    with pytest.raises(ConfigurationError, match=r"--chat-template-kwargs .* does not read enable_thinkin:"):
        text.use_template_kwargs('{"enable_thinkin": false}')
    two = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}{{ messages[0].content }}"}
    text.tokenizer.chat_template = two
    text.check_template_reads("tools", "--tools-key tools")
    with pytest.raises(ConfigurationError, match=r"--chat-template-kwargs .* does not read enable_thinking"):
        text.use_template_kwargs('{"enable_thinking": false}')


def test_special_tokens_stay_in_a_response_but_for_its_end(tmp_path):
    """The marks of a tool call by special tokens; without special tokens the call could not be seen."""
    text = HuggingFaceText(tokenizer_folder(tmp_path), chat=False)
    ids = text.tokens_of("<s>search(1)</s>") + [text.pad] * 2
    assert text.response_text(ids) == "<s>search(1)"
    assert text.response_text(text.tokens_of("a</s><pad>b<pad>")) == "a</s><pad>b", "only at its end"
    assert text.text_of(ids) == "<s>search(1)</s><pad><pad>"
    text.skip_special_tokens = True
    assert text.response_text(ids) == text.text_of(ids) == "search(1)"


def test_problems_are_shown_as_text_or_as_conversations(tmp_path):
    """Examples come first, as turns of a conversation too; one that a problem brings is shown whole."""
    text = HuggingFaceText(tokenizer_folder(tmp_path), chat=False)
    assert text.decode(text.encode(PROBLEM)) == "1 + 2 = ?\n3\n4 + 5 = ?\n"
    assert (text.pad, text.eos, text.size) == (0, 2, 259)
    text = HuggingFaceText(tmp_path, chat=True)
    ids = text.encode(PROBLEM)
    shown = "[user]1 + 2 = ?</s>[assistant]3</s>[user]4 + 5 = ?</s>[assistant]"
    assert text.tokenizer.decode(ids) == shown
    assert ids.count(text.eos) == 3
    message = ({"role": "system", "content": "add"}, {"role": "user", "content": " 4 + 5 "})
    shown = text.tokenizer.decode(text.encode(Problem(" 4 + 5 ", "9", messages=message)))
    assert shown == "[system]add</s>[user] 4 + 5 </s>[assistant]"
    # A response is decoded without its end.
    ids = text.tokenizer.encode("12 </s>")
    assert (ids[-1], text.response_text(ids)) == (text.eos, "12 ")
    characters = CharacterText("123 ")
    assert characters.response_text([*characters.encode(Problem("12 ", None)), characters.eos]) == "12 "


def test_a_tokenizer_may_lack_padding_but_no_end(tmp_path):
    text = HuggingFaceText(tokenizer_folder(tmp_path / "pad", pad=None), chat=False)
    assert text.pad == text.eos == 2, "the end fills batches"
    assert text.pad_token is None
    with pytest.raises(ConfigurationError, match="has no eos_token"):
        HuggingFaceText(tokenizer_folder(tmp_path / "eos", eos=None), chat=False)


def test_a_template_that_refuses_a_conversation_is_named(tmp_path):
    tokenizer_folder(tmp_path, template="{{ raise_exception('system first') }}")
    with pytest.raises(ConfigurationError, match=r"--apply-chat-template: .* \(system first\)"):
        HuggingFaceText(tmp_path, chat=True).encode(PROBLEM)


def test_folders_without_a_readable_tokenizer_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        HuggingFaceText(tmp_path, chat=False)


def test_a_model_directory_brings_its_tokenizer(tmp_path):
    """--load-hf is enough: architecture, weights and tokenizer lie in one place."""
    model = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path)
    arguments = [
        "--seq-length=256",
        "--task=count_up",
        "--train-iters=1",
        "--global-batch-size=64",
        "--lr=1e-3",
        "--cpu",
    ]
    arguments += [f"--load-hf={tmp_path}", f"--runs-dir={tmp_path}/runs"]
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        configure(arguments, 1)
    tokenizer_folder(tmp_path)
    config, task = configure(arguments, 1)
    assert isinstance(task.text, HuggingFaceText)
    assert config.task.tokenizer_type == "HuggingFaceTokenizer"
