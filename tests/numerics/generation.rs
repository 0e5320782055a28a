//! A model of transformers: from the commands of the guide to the tokens of its own `generate`.

use std::{fs, process::Command};

use precast::{
    Store,
    runtime::{Outputs, Value},
};

use crate::lab::{checkout, precast, python, runtime, shared};

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

const GENERATE: &str = r#"import json, sys, torch, my
prompt, count = torch.tensor([json.loads(sys.argv[1])]), int(sys.argv[2])
out = my.load().generate(prompt, max_new_tokens=count, do_sample=False)
print(out[0, prompt.shape[1]:].tolist())
"#;

/// The largest prompt of a program has 16 tokens.
const PROMPT: [i64; 19] = [
    5, 17, 3, 80, 41, 9, 62, 2, 33, 71, 96, 12, 28, 54, 7, 66, 1, 90, 45,
];
const TOKENS: usize = 24;

#[test]
fn a_session_answers_as_generate_does() {
    let found = Command::new(python()).args(["-c", "import transformers"]).output();
    if !found.unwrap().status.success() {
        println!("skipped: {} has no transformers", python().display());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("my.py"), MODEL).unwrap();
    for line in commands() {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = precast(&shared().store, &words);
        let output = command.current_dir(folder.path()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {errors}");
    }

    let store = Store::open(&shared().store).unwrap();
    let model = runtime(&store).load("my").unwrap();
    let mut session = model.session().unwrap();
    let greedy = [
        Value::new(&[0.0_f32], &[1]).unwrap(),
        Value::new(&[1_i64], &[1]).unwrap(),
        Value::new(&[1.0_f32], &[1]).unwrap(),
        Value::new(&[0.0_f32], &[1]).unwrap(),
    ];
    let token = |out: &Outputs| out.array_named::<i64>("token").unwrap().data()[0];
    let mut tokens = vec![token(&session.prefill(&PROMPT, &greedy).unwrap())];
    while tokens.len() < TOKENS {
        let last = tokens[tokens.len() - 1];
        tokens.push(token(&session.decode(last, &greedy).unwrap()));
    }

    let mut script = Command::new(python());
    let script = script.current_dir(folder.path()).args(["-c", GENERATE]);
    let script = script.args([format!("{PROMPT:?}"), TOKENS.to_string()]);
    let output = script.output().unwrap();
    let eager: Vec<i64> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(tokens, eager);
    // A model that repeats one token would prove little.
    let distinct: std::collections::BTreeSet<_> = tokens.iter().collect();
    assert!(distinct.len() > 5, "{tokens:?}");
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
