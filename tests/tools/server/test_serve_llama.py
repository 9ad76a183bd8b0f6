"""llama-server's own API, with the bundled model."""

import pytest

PROMPT, LIMIT = "def f(", {"n_predict": 8}
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


def test_texts(served):
    whole = served.post("/completion", {"prompt": PROMPT, **LIMIT})
    same = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8})["choices"][0]["text"]
    assert whole["content"] == same and whole["stop"] and whole["tokens"] == []
    assert (whole["stop_type"], whole["tokens_predicted"], whole["truncated"]) == ("limit", 8, False)
    assert whole["timings"]["predicted_n"] == 8 and whole["generation_settings"]["n_predict"] == 8

    chunks = served.stream("/completion", {"prompt": PROMPT, **LIMIT})
    assert "".join(chunk["content"] for chunk in chunks) == same
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    ids = [token for chunk in chunks for token in chunk["tokens"]]
    assert served.post("/detokenize", {"tokens": ids})["content"] == same
    assert served.post("/completion", {"prompt": PROMPT, "return_tokens": True, **LIMIT})["tokens"] == ids

    word = served.post("/completion", {"prompt": PROMPT, "stop": [same[3:6]], **LIMIT})
    assert (word["stop_type"], word["stopping_word"]) == ("word", same[3:6])
    assert word["content"] == same[: same.index(same[3:6])]
    all_of_it = served.post("/completion", {"prompt": PROMPT, "ignore_eos": True})
    assert all_of_it["truncated"] and all_of_it["generation_settings"]["ignore_eos"]


def test_vllms_tokenizer(served):
    """As lm-evaluation-harness uses it: ids of the server, whose log probabilities are then those of the texts."""
    info = served.request("/tokenizer_info")[2]
    assert info["eos_token"] == "<|im_end|>" and "<|im_start|>" in info["chat_template"]
    found = served.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})
    ids = served.post("/tokenize", {"content": PROMPT})["tokens"]
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    assert served.post("/detokenize", {"tokens": ids})["prompt"] == PROMPT
    body = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    by_ids, by_text = (
        served.post("/v1/completions", one)["choices"][0]["logprobs"] for one in (body, body | {"prompt": PROMPT})
    )
    assert by_ids == by_text and len(by_ids["token_logprobs"]) == len(ids) + 1
    for body in ({}, {"prompt": 5}, {"prompt": PROMPT, "add_special_tokens": "no"}):
        assert served.request("/tokenize", body)[0] == 400


def test_prompts(served):
    ids = served.post("/tokenize", {"content": PROMPT})["tokens"]
    one = served.post("/completion", {"prompt": PROMPT, **LIMIT})["content"]
    assert served.post("/completion", {"prompt": ids, **LIMIT})["content"] == one
    assert served.post("/completion", {"prompt": {"prompt_string": PROMPT}, **LIMIT})["content"] == one
    mixed = [*ids[:2], served.post("/detokenize", {"tokens": ids[2:]})["content"]]
    assert served.post("/tokenize", {"content": mixed[2]})["tokens"] == ids[2:]
    assert served.post("/completion", {"prompt": mixed, **LIMIT})["content"] == one
    assert served.post("/completion", {"prompt": [mixed, PROMPT], **LIMIT})[0]["content"] == one
    many = served.post("/completion", {"prompt": [ids, PROMPT, {"prompt_string": PROMPT}], **LIMIT})
    assert [answer["content"] for answer in many] == [one] * 3 and [answer["index"] for answer in many] == [0, 1, 2]


def test_probabilities_and_formats(served):
    body = {"prompt": PROMPT, "n_predict": 2, "n_probs": 3}
    found = served.post("/completion", body)["completion_probabilities"]
    assert len(found) == 2 and all(len(one["top_logprobs"]) == 3 for one in found)
    assert found[0]["id"] == found[0]["top_logprobs"][0]["id"]
    schema = {"enum": ["red", "blue"]}
    assert served.post("/completion", {"prompt": PROMPT, "json_schema": schema})["content"].strip() in (
        '"red"',
        '"blue"',
    )
    assert served.post("/completion", {"prompt": PROMPT, "grammar": 'root ::= "yes"'})["content"] == "yes"


@pytest.mark.parametrize(
    "prompt", [None, [], [1, 2.5], {"prompt_string": 5}, {"prompt_string": "x", "multimodal_data": ["y"]}]
)
def test_wrong_prompts(served, prompt):
    status, _, answer = served.request("/completion", {"prompt": prompt})
    assert status == 400 and "prompt" in answer["error"]["message"]


def test_chosen_fields(served):
    fields = ["content", "generation_settings/n_predict", "none", "content/none"]
    body = {"prompt": PROMPT, "response_fields": fields, **LIMIT}
    whole = served.post("/completion", body)
    assert whole["generation_settings/n_predict"] == 8 and whole.keys() == {*fields[:2]}
    assert served.stream("/completion", body)[-1].keys() == whole.keys()
    assert served.post("/completion", {**body, "prompt": [PROMPT]}) == [whole]


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_timings_of_each_chunk(served, path):
    body = {"prompt": PROMPT, "messages": QUESTION, "max_tokens": 30}
    chunks = served.stream(path, {**body, "timings_per_token": True})
    texts = [
        chunk
        for chunk in chunks
        if chunk.get("content") or chunk.get("choices", [{}])[0].get("delta", {}).get("content")
    ]
    counts = [chunk["timings"]["predicted_n"] for chunk in texts]
    assert counts == sorted(counts) and 0 < counts[0] <= 30
    assert sum("timings" in chunk for chunk in served.stream(path, body)) == 1


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_progress_of_prompts(served, path):
    """Before the first text: when a prompt is begun, and after each of its chunks."""
    text = path + " ".join(f"some {number}" for number in range(400))
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    chunks = served.stream(path, {**body, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    (end,) = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert all("prompt_progress" in chunk or _is_first(chunk) for chunk in chunks[: len(told)])
    assert [one["processed"] for one in told] == [0, *range(512, told[0]["total"], 512), told[0]["total"]]
    assert {(one["total"], one["cache"]) for one in told} == {(end["prompt_n"], 0)} and end["prompt_n"] > 1024
    times = [one["time_ms"] for one in told]
    assert times[0] == 0 < times[-1] <= end["prompt_ms"] + 1 and times == sorted(times)

    again = served.stream(path, {**body, "return_progress": True})
    first, *rest = (chunk["prompt_progress"] for chunk in again if "prompt_progress" in chunk)
    assert 0 < first["cache"] == first["processed"] < first["total"] == rest[-1]["processed"]
    assert not any("prompt_progress" in chunk for chunk in served.stream(path, body))
    assert "prompt_progress" not in served.post(path, {**body, "return_progress": True})


def _is_first(chunk):
    """OpenAI's chat begins with the role."""
    return chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_progress_of_several_prompts(served):
    prompts = [f"several {number} " * 9 for number in range(3)]
    chunks = served.stream("/completion", {"prompt": prompts, "n_predict": 2, "return_progress": True})
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        told = [chunk["prompt_progress"]["processed"] for chunk in own if "prompt_progress" in chunk]
        assert told[0] == 0 and told[-1] == own[-1]["tokens_evaluated"] and own[-1]["stop"]


def test_the_model_and_its_prompts(served):
    made = served.post("/apply-template", {"messages": QUESTION})["prompt"]
    assert made == f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    props = served.request("/props")[2]
    assert props["default_generation_settings"]["n_ctx"] == 2048 and "im_start" in props["chat_template"]
    assert served.request("/props?model=none")[0] == 404


def test_addresses_without_a_version(served):
    assert served.request("/models")[2] == served.request("/v1/models")[2]
    body = {"messages": QUESTION, "max_tokens": 4}
    answers = [served.post(path, body)["choices"] for path in ("/chat/completions", "/v1/chat/completions")]
    assert answers[0] == answers[1]
    assert served.post("/responses", {"input": "x", "max_output_tokens": 2})["object"] == "response"
