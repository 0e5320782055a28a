//! A model of transformers: from the commands of the guide to the tokens of its own `generate`.

use std::{collections::BTreeSet, fs, process::Command};

use precast::{
    Store,
    runtime::{Outputs, Session, Value},
};

use crate::lab::{checkout, json, precast, python, runtime, said, shared, well};

/// Three layers, two of which see the last eight tokens only.
const MODEL: &str = r#"import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig


def load():
    torch.manual_seed(0)
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=97, max_position_embeddings=64, sliding_window=8, layer_types=layers, eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, value in model.named_parameters():
        if value.dim() > 1:
            value.data.normal_(0, 0.02 if "embed" in name else 0.3)
    return model
"#;

/// Sound in, tokens out.
const SPEECH: &str = r#"import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration


def load():
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=97, num_mel_bins=8, max_source_positions=20,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    for name, value in model.named_parameters():
        if value.dim() > 1:
            value.data.normal_(0, 0.1 if "embed" in name else 0.4)
    model.generation_config.eos_token_id = None
    return model
"#;

/// Prints the tokens after the prompt.
const GENERATE: &str = r#"import importlib, json, sys, torch
prompt, count = json.loads(sys.argv[1]), int(sys.argv[2])
model = importlib.import_module(sys.argv[3]).load()
if model.config.is_encoder_decoder:
    frames = torch.arange(320.0).sin().view(1, 8, 40)
    out = model.generate(frames, decoder_input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
else:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
print(out[0].tolist()[-count:])
"#;

/// The largest prompt of a program has 16 tokens.
const PROMPT: [i64; 19] = [
    5, 17, 3, 80, 41, 9, 62, 2, 33, 71, 96, 12, 28, 54, 7, 66, 1, 90, 45,
];
const TOKENS: usize = 24;

#[test]
fn a_decoder_answers_as_generate_does() {
    answers_as_generate("words", MODEL, &PROMPT, |_| {});
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_model_with_an_encoder_answers_as_generate_does() {
    answers_as_generate("speech", SPEECH, &[1, 50, 7, 33, 8], |session| {
        let frames: Vec<f32> = (0..320).map(|at| (at as f32).sin()).collect();
        let frames = Value::new(&frames, &[1, 8, 40]).unwrap();
        session.run("encode", &[frames]).unwrap();
    });
}

/// Builds a model with the commands of the guide, and compares the tokens of a session with those of `generate`.
fn answers_as_generate(name: &str, source: &str, prompt: &[i64], first: fn(&mut Session<'_>)) {
    let found = said(Command::new(python()).args(["-c", "import transformers"]));
    if found.code != Some(0) {
        println!("skipped: {} has no transformers", python().display());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let store = &shared().store;
    fs::write(folder.path().join(format!("{name}.py")), source).unwrap();
    let mut told = String::new();
    for line in commands() {
        // In the shared store each model has its own name.
        let line = line.replace("my:load", &format!("{name}:load"));
        let words: Vec<&str> = line.split(' ').collect();
        told = well(precast(store, &words).current_dir(folder.path())).err;
        // A session sends its tokens through the buckets that they fill: nothing is said about padding.
        assert!(!told.contains("exact sizes only"), "{name}: {told}");
    }
    let compared = "`prefill` and `decode` agree with eager for 32 tokens of a session";
    assert!(told.contains(compared), "{name}: {told}");

    let model = runtime(&Store::open(store).unwrap()).load(name).unwrap();
    let mut session = model.session().unwrap();
    first(&mut session);
    let one = |value: f32| Value::new(&[value], &[1]).unwrap();
    let top = Value::new(&[1_i64], &[1]).unwrap();
    let greedy = [one(0.0), top, one(1.0), one(0.0)];
    let token = |out: &Outputs| out.array_named::<i64>("token").unwrap().data()[0];
    let mut tokens = vec![token(&session.prefill(prompt, &greedy).unwrap())];
    while tokens.len() < TOKENS {
        let last = tokens[tokens.len() - 1];
        tokens.push(token(&session.decode(last, &greedy).unwrap()));
    }

    let mut script = Command::new(python());
    let script = script.current_dir(folder.path()).args(["-c", GENERATE]);
    let script = script.args([format!("{prompt:?}"), TOKENS.to_string(), name.to_owned()]);
    assert_eq!(serde_json::json!(tokens), json(script), "{name}");
    // A model that repeats one token would prove little.
    let distinct: BTreeSet<_> = tokens.iter().collect();
    assert!(distinct.len() > 5, "{name}: {tokens:?}");
}

/// Returns the commands of the guide for a model of transformers.
fn commands() -> Vec<String> {
    let page = fs::read_to_string(checkout().join("docs/src/guide/state.md")).unwrap();
    let section = page.split("## A model of transformers").nth(1).unwrap();
    let block = section.split("```console\n").nth(1).unwrap();
    let block = block.split("```").next().unwrap().lines();
    let lines = block.filter_map(|line| line.strip_prefix("$ precast "));
    let lines: Vec<String> = lines.map(str::to_owned).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    lines
}
