"""The exported model in transformers, accelerate and peft: each part is called as a module."""

import copy
from types import SimpleNamespace

import export
import pytest
import torch
import train_modern
import transformers
import weights
from conftest import random_run
from transformers import DynamicCache

import train_gpt2

pytestmark = pytest.mark.usefixtures("modules_cache")
BYTES = weights.pack.get_encoding("bytes")
SIZES = dict(n_head=2, n_embd=16, sequence_length=512)
MODELS = {
    "gpt2": (train_gpt2, dict(n_layer=2)),
    "modern": (
        train_modern, dict(n_layer=2, attention_window=0, ngram_rows=50, max_ngram=4),
    ),
    "windowed": (
        train_modern,
        dict(n_layer=8, attention_window=300, document_token=256, ngram_rows=50, max_ngram=3),
    ),
}  # fmt: skip


# Tests that depend on windows or on layers without attention ask for all MODELS.
@pytest.fixture(scope="module", params=["gpt2", "modern"])
def model(request, tmp_path_factory):
    """An exported model with random weights, and the GPT that it must agree with."""
    folder = tmp_path_factory.mktemp(request.param)
    script, settings = MODELS[request.param]
    random_run(folder, script.RECIPE, **SIZES | settings)
    gpt, args, _ = weights.load(folder / "model.pt", dtype=torch.float32)
    export.write_model(folder, gpt, args, BYTES, script.RECIPE)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return SimpleNamespace(hf=model.requires_grad_(False), gpt=gpt.requires_grad_(False))


def random_tokens(*shape):
    """Return random bytes, which do not start a document."""
    return torch.randint(250, shape, generator=torch.Generator().manual_seed(1))


def largest_difference(a, b):
    return (a - b).abs().max().item()


# ---- Modules -------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload"])
def test_accelerate_can_offload_the_weights(kind, model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    tokens, hf = random_tokens(2, 20), copy.deepcopy(model.hf)
    if kind == "cpu_offload":
        accelerate.cpu_offload(hf, torch.device("cpu"))
    else:
        accelerate.disk_offload(hf, str(tmp_path), torch.device("cpu"))
    assert all(p.device.type == "meta" for p in hf.parameters())
    for _ in range(2):
        assert largest_difference(hf(tokens).logits, model.gpt(tokens)) < 1e-5


def test_lora_on_any_matrix_changes_the_logits_as_its_merged_weights_do(model):
    """That includes the head, the embeddings, the value embeddings and the n-gram table.

    A warning says that a tied matrix must be untied first, because merging would change both uses.
    """
    peft = pytest.importorskip("peft")
    tokens = random_tokens(2, 20)
    before = model.hf(tokens).logits
    kinds = torch.nn.Linear, torch.nn.Embedding
    names = [name for name, module in model.hf.named_modules() if isinstance(module, kinds)]
    configs = {name: peft.LoraConfig(target_modules=[name]) for name in names}
    if hasattr(model.gpt, "ngrams"):
        configs["ngrams"] = peft.LoraConfig(target_parameters=["gpt.ngrams.weight"])
    for name, config in configs.items():
        torch.manual_seed(0)
        hf = copy.deepcopy(model.hf)
        config.init_lora_weights = False
        if hf.config.tie_word_embeddings and name in ("gpt.wte", "gpt.lm_head"):
            if name == "gpt.lm_head":
                with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
                    peft.get_peft_model(copy.deepcopy(hf), config)
            else:
                with pytest.warns(UserWarning, match="wte is also lm_head: .* cannot be merged"):
                    peft.get_peft_model(copy.deepcopy(hf), config)(tokens)
            hf.gpt.lm_head.weight = torch.nn.Parameter(hf.gpt.wte.weight.clone())
            hf.config.tie_word_embeddings = False
        lora = peft.get_peft_model(hf, config).eval()
        adapted = lora(tokens).logits.detach()
        merged = lora.merge_and_unload()(tokens).logits.detach()
        assert largest_difference(adapted, before) > 1e-3, name
        assert largest_difference(adapted, merged) < 1e-4, name


# ---- Arguments -----------------------------------------------------------------------------------
def documents():
    """Return tokens of three documents, of which the second one contains an end-of-text token."""
    parts = list(random_tokens(1, 400).split([150, 200, 50], dim=1))
    parts[1][0, 30] = 256
    return parts


def position_ids_of(parts):
    return torch.cat([torch.arange(part.size(1))[None] for part in parts], dim=1)


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("padding", [0, 5])
def test_packed_documents_do_not_see_each_other(padding, model):
    """position_ids that restart at 0 begin a document, with padding before it or without."""
    parts = documents()
    tokens = torch.nn.functional.pad(torch.cat(parts, dim=1), (padding, 0))
    ids = torch.nn.functional.pad(position_ids_of(parts), (padding, 0), value=1)
    mask = (torch.arange(tokens.size(1)) >= padding).long()[None]
    packed = model.hf(tokens, attention_mask=mask if padding else None, position_ids=ids)
    expected = torch.cat([model.gpt(part) for part in parts], dim=1)
    assert largest_difference(packed.logits[:, padding:], expected) < 2e-5
    together = model.hf(tokens, attention_mask=mask).logits[:, padding:]
    assert largest_difference(together[:, :150], expected[:, :150]) < 2e-5
    assert largest_difference(together[:, 150:], expected[:, 150:]) > 1e-2


def test_usual_position_ids_change_nothing_and_others_are_refused(model):
    tokens = random_tokens(2, 20)
    expected = model.hf(tokens).logits
    for ids in torch.arange(20), torch.arange(20)[None], torch.arange(20).expand(2, 20):
        assert torch.equal(model.hf(tokens, position_ids=ids).logits, expected)
    for ids in torch.arange(20) + 1, 2 * torch.arange(20), torch.arange(20).flip(0):
        with pytest.raises(ValueError, match="position_ids must be 0, 1, 2, "):
            model.hf(tokens, position_ids=ids)


def test_what_the_model_cannot_do_is_refused(model):
    hf, tokens = model.hf, random_tokens(2, 8)
    refused = [
        (dict(inputs_embeds=torch.zeros(2, 8, 16)), TypeError, "inputs_embeds"),
        (dict(output_attentions=True), TypeError, "output_attentions"),
        (dict(output_hidden_states=True), TypeError, "output_hidden_states"),
        (dict(attention_mask=torch.ones(2, 1, 8, 8)), ValueError, "must have the shape"),
        (dict(attention_mask=torch.ones(2, 7)), ValueError, "must have the shape"),
        (dict(attention_mask={"full_attention": None}), ValueError, "must have the shape"),
        (dict(token_type_ids=tokens), TypeError, "token_type_ids"),
        (dict(cu_seq_lens_q=torch.tensor([0, 4, 8])), TypeError, "cu_seq_lens_q"),
        (dict(lables=tokens), TypeError, "lables"),
        # The argument's name since and before transformers 5.24
        (dict(cache=DynamicCache()), TypeError, "no use for the argument cache"),
        (dict(past_key_values=DynamicCache()), TypeError, "no use for the argument past_key_v"),
        (dict(input_ids=random_tokens(1, 513)), ValueError, "513 .* than sequence_length=512"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            hf(**dict(input_ids=tokens) | arguments)
    with pytest.raises(TypeError, match="input_ids"):
        hf(inputs_embeds=torch.zeros(2, 8, 16))
    if hasattr(model.gpt, "ngrams"):
        with pytest.raises(ValueError, match="tables cannot be resized"):
            copy.deepcopy(hf).resize_token_embeddings(300)
    else:
        resized = copy.deepcopy(hf)
        resized.resize_token_embeddings(300)
        assert resized(tokens).logits.shape == (2, 8, 300)


def test_tuples_and_some_logits_are_returned_on_request(model):
    hf, tokens = model.hf, random_tokens(2, 8)
    expected = hf(tokens)
    assert torch.equal(hf(tokens, return_dict=False)[0], expected.logits)
    loss, logits = hf(tokens, labels=tokens, return_dict=False, use_cache=False)
    assert loss.ndim == 0 and torch.equal(logits, expected.logits)
    some = hf(tokens, logits_to_keep=torch.tensor([2, 5])).logits
    assert torch.equal(some, expected.logits[:, [2, 5]])
    total = hf(tokens, labels=tokens, num_items_in_batch=7).loss
    assert torch.isclose(total, hf(tokens, labels=tokens).loss * (2 * 7) / 7)


def assert_most_likely(gpt, generated, prompts, starts):
    """Assert that each new token is the most likely one. Row i of prompts begins at starts[i]."""
    for row, start in enumerate(starts):
        tokens = prompts[row : row + 1, start:]
        for _ in range(generated.size(1) - prompts.size(1)):
            following = gpt(tokens[:, -512:])[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
        assert torch.equal(generated[row, start:], tokens[0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_from_padded_prompts_takes_the_most_likely_tokens(use_cache, model):
    """generate passes position_ids, with 0 or 1 for padding, depending on the version."""
    prompts = random_tokens(3, 30)
    mask = (torch.arange(30) >= torch.tensor([[0], [7], [19]])).long()
    options = dict(max_new_tokens=6, do_sample=False, use_cache=use_cache, suppress_tokens=None)
    generated = model.hf.generate(prompts, attention_mask=mask, eos_token_id=-1, **options)
    assert_most_likely(model.gpt, generated, prompts, (0, 7, 19))


def test_stop_strings_end_a_text(model):
    tokenizer, prompt = export.tokenizer_of(BYTES, 512), random_tokens(1, 30)
    others_than_letters = [*range(97), *range(123, 257)]
    options = dict(max_new_tokens=6, do_sample=False, suppress_tokens=others_than_letters)
    text = tokenizer.decode(model.hf.generate(prompt, **options)[0, 30:])
    stop = text[2:4]
    stopped = model.hf.generate(prompt, **options, stop_strings=[stop], tokenizer=tokenizer)
    expected = text[: text.index(stop) + 2]
    assert len(text) == 6 and tokenizer.decode(stopped[0, 30:]) == expected


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_a_text_longer_than_sequence_length_continues_from_its_last_tokens(model):
    """The row with padding, which has fewer tokens, never reaches that length."""
    prompts = random_tokens(2, 510)
    mask = torch.ones_like(prompts)
    mask[1, :300] = 0
    options = dict(max_new_tokens=5, do_sample=False, suppress_tokens=None, eos_token_id=-1)
    generated = model.hf.generate(prompts, attention_mask=mask, **options)
    assert_most_likely(model.gpt, generated, prompts, (0, 300))


@pytest.mark.parametrize("model", ["gpt2", "windowed"], indirect=True)
def test_the_model_can_be_captured_by_torch_export(model):
    """The captured graph, which converters such as that to ONNX use, takes other lengths, too."""
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model.hf, (random_tokens(2, 20),), dynamic_shapes=(shape,))
    for tokens in random_tokens(1, 9), random_tokens(3, 200):
        assert largest_difference(program.module()(tokens).logits, model.gpt(tokens)) < 2e-5


# ---- Fine-tuning ---------------------------------------------------------------------------------
def test_padding_is_no_token_of_a_text_and_the_end_of_a_text_is_trained(model):
    tokenizer = export.tokenizer_of(BYTES, 512)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (255, 256)
    texts = ["abc" + tokenizer.eos_token, "ÿ" + tokenizer.eos_token]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate([tokenizer(text) for text in texts])
    assert batch["labels"].tolist() == [[97, 98, 99, 256], [-100, 195, 191, 256]]
    assert batch["input_ids"][1, 0] == 255 and batch["attention_mask"].sum() == 7
    assert tokenizer.decode(batch["input_ids"][1], skip_special_tokens=True) == "ÿ"
    config = model.hf.generation_config
    assert config.pad_token_id == 255 and 255 in config.suppress_tokens


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("is_packed", [True, False])
def test_trainer_learns_the_same_from_padded_and_from_packed_documents(is_packed, model, tmp_path):
    pytest.importorskip("accelerate")
    parts = documents()
    rows = [dict(input_ids=part[0].tolist(), labels=part[0].tolist()) for part in parts]
    if is_packed:
        collate = transformers.DataCollatorWithFlattening()
    else:

        def collate(rows):
            ids = [torch.tensor(row["input_ids"]) for row in rows]
            pad = torch.nn.utils.rnn.pad_sequence
            mask = pad([torch.ones_like(row) for row in ids], True)
            labels = pad(ids, True, -100)
            return dict(input_ids=pad(ids, True), labels=labels, attention_mask=mask)

    options = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, max_steps=1, learning_rate=0.0, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        gradient_checkpointing=True,
    )  # fmt: skip
    hf = copy.deepcopy(model.hf).requires_grad_(True)
    trainer = transformers.Trainer(hf, options, data_collator=collate, train_dataset=rows)
    loss = trainer.train().training_loss
    targets = sum(part.size(1) - 1 for part in parts)
    total = sum(model.gpt(part[:, :-1], part[:, 1:]) * (part.size(1) - 1) for part in parts)
    assert abs(loss - total.item() / targets) < 1e-4


def gradients_of(hf):
    """Return the gradients of the loss in training mode."""
    hf.train().requires_grad_(True).zero_grad()
    hf(random_tokens(2, 40), labels=random_tokens(2, 40)).loss.backward()
    return [p.grad.clone() for p in hf.parameters()]


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_activation_checkpointing_recomputes_each_block_and_changes_no_gradient(model):
    hf, calls = copy.deepcopy(model.hf), []
    for block in hf.gpt.h:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = gradients_of(hf)
    assert len(calls) == len(hf.gpt.h)
    hf.gradient_checkpointing_enable(dict(use_reentrant=False))
    for gradient, other in zip(expected, gradients_of(hf), strict=True):
        assert torch.equal(gradient, other)
    assert len(calls) == 3 * len(hf.gpt.h)
    hf.gradient_checkpointing_disable()
    gradients_of(hf)
    assert len(calls) == 4 * len(hf.gpt.h)


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_head_and_the_last_hidden_state_give_the_logits(padding, model):
    """The trainers of TRL compute them like this."""
    parts, hf = documents(), copy.deepcopy(model.hf).requires_grad_(True)
    tokens = torch.nn.functional.pad(torch.cat(parts, dim=1), (padding, 0))
    ids = torch.nn.functional.pad(position_ids_of(parts), (padding, 0), value=1)
    arguments = dict(attention_mask=(torch.arange(tokens.size(1)) >= padding).long()[None])
    for packing in dict(), dict(position_ids=ids, cu_seq_lens_q=torch.tensor([0, 150, 350, 400])):
        arguments |= packing
        hidden = hf.base_model(tokens, use_cache=False, **arguments).last_hidden_state
        logits = hidden @ hf.get_output_embeddings().weight.T
        if softcap := hf.config.final_logit_softcapping:
            logits = softcap * torch.tanh(logits / softcap)
        expected = model.hf(tokens, **arguments).logits
        assert largest_difference(logits[:, padding:], expected[:, padding:]) < 2e-5
        logits.sum().backward()
    assert all(p.grad is not None for p in hf.parameters())


def test_a_last_hidden_state_that_does_not_give_the_logits_is_refused(model):
    hf = copy.deepcopy(model.hf)
    hf.gpt.register_forward_hook(lambda gpt, inputs, logits: 0.5 * logits)
    with pytest.raises(ValueError, match="are not those of its head"):
        hf.base_model(random_tokens(1, 8))
