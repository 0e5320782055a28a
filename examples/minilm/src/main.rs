//! Finds the nearest sentence to each of a few, with all-MiniLM-L6-v2 compiled by `precast build`: no Python here.
//!
//! ```console
//! $ precast build -f examples/minilm/precast.toml
//! $ minilm --store artifacts --sentences examples/minilm/sentences.txt --model FOLDER_WITH_TOKENIZER_JSON
//! ```
//!
//! Each sentence is one request of its own length; the runtime picks its bucket. `make demo` runs it, with eager's
//! embeddings of the same sentences to compare with.
#![allow(clippy::print_stdout, reason = "a program that prints its answer")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Parser, ValueEnum};
use precast_runtime::{Device, Model, Outputs, Runtime, Store, Value};
use precast_store::record::{Dtype, Sizes};
use safetensors::SafeTensors;
use serde_json::json;
use tokenizers::Tokenizer;

/// The least cosine between an embedding and eager's.
const AGREES: f32 = 0.9999;

#[derive(Parser)]
#[command(about = "Finds the nearest sentence to each of a few")]
struct Args {
    /// The store that `precast build` filled
    #[arg(long, default_value = "artifacts", value_name = "DIR")]
    store: PathBuf,
    /// The folder of the package `torch`
    #[arg(long, env = "LIBTORCH", value_name = "DIR")]
    libtorch: Option<PathBuf>,
    /// Text file, one sentence a line
    #[arg(long, value_name = "FILE")]
    sentences: PathBuf,
    /// Folder of the model's files, for `tokenizer.json`
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Eager's embeddings of the same sentences, as eager.py writes them; the exit code is 1 when they disagree
    #[arg(long, value_name = "FILE")]
    eager: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t = On::Cpu)]
    device: On,
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum On {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Human,
    Json,
}

/// One sentence with its answer.
struct Row {
    text: String,
    tokens: usize,
    bucket: String,
    /// Share of the bucket that is padding.
    padding: f64,
    ms: f64,
    /// At unit length.
    embedding: Vec<f32>,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let text = fs::read_to_string(&args.sentences)
        .with_context(|| args.sentences.display().to_string())?;
    let tokenizer = tokenizer(&args.model)?;
    let device = match args.device {
        On::Cpu => Device::Cpu,
        On::Cuda => Device::Cuda(0),
    };

    let started = Instant::now();
    Runtime::libtorch(args.libtorch.as_deref(), false)?;
    let store = Store::open(&args.store)?;
    let model = Runtime::new(&store, device)?.load("minilm")?;
    let load_ms = started.elapsed().as_secs_f64() * 1e3;
    let rows = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|line| embed(&model, &tokenizer, line))
        .collect::<Result<Vec<_>>>()?;
    ensure!(
        rows.len() > 1,
        "`{}` has fewer than two sentences",
        args.sentences.display()
    );

    let nearest: Vec<(usize, f32)> = (0..rows.len()).map(|i| nearest(&rows, i)).collect();
    let agreement = args
        .eager
        .as_deref()
        .map(|path| agreement(&rows, path))
        .transpose()?;
    match args.format {
        Format::Human => print_human(&rows, &nearest, load_ms, agreement),
        Format::Json => print_json(&rows, &nearest, load_ms, agreement),
    }
    Ok(match agreement {
        Some(cosine) if cosine < AGREES => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}

/// Returns the model's tokenizer without its own padding: that is the runtime's work here.
fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let mut tokenizer = Tokenizer::from_file(&path)
        .map_err(|error| anyhow!("{error}"))
        .with_context(|| path.display().to_string())?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// Runs one sentence through the module `encode`: `[1, seq]` int64 ids and mask to `[1, seq, 384]`, then the mean over
/// the tokens at unit length.
fn embed(model: &Model, tokenizer: &Tokenizer, text: &str) -> Result<Row> {
    let encoding = tokenizer
        .encode(text, true)
        .map_err(|error| anyhow!("{error}"))?;
    let ids: Vec<i64> = encoding.get_ids().iter().map(|&id| id.into()).collect();
    let shape = [1, ids.len()];
    let mask = Value::new(&vec![1_i64; ids.len()], &shape)?;
    let ids = Value::new(&ids, &shape)?;
    let call = || model.run_named("encode", &[("input_ids", &ids), ("attention_mask", &mask)]);
    // The first call of a bucket fills pages and caches; a service sees the time of the second one.
    first_output(&call()?)?;
    let started = Instant::now();
    let answer = call()?;
    let tokens = first_output(&answer)?;
    let ms = started.elapsed().as_secs_f64() * 1e3;

    let width = tokens.len() / shape[1];
    let mut mean = vec![0.0; width];
    for token in tokens.chunks_exact(width) {
        let share = 1.0 / shape[1] as f32;
        mean.iter_mut()
            .zip(token)
            .for_each(|(mean, x)| *mean += x * share);
    }
    let length = mean.iter().map(|x| x * x).sum::<f32>().sqrt();
    let served = answer.served();
    let size = |sizes: &Sizes| sizes.values().product::<i64>() as f64;
    Ok(Row {
        text: text.to_owned(),
        tokens: encoding.len(),
        bucket: served.program().bucket(),
        padding: served
            .bucket()
            .map_or(0.0, |bucket| 1.0 - size(&served.request()) / size(bucket)),
        ms,
        embedding: mean.into_iter().map(|x| x / length).collect(),
    })
}

/// Returns the elements of the first output, which is float16 where the weights are.
///
/// Taking the answer off the device waits for it. It fails where the model has no row for an id.
fn first_output(answer: &Outputs) -> Result<Vec<f32>> {
    answer.check()?;
    let tokens = answer[0].to_dtype(Dtype::Float32)?;
    Ok(tokens.to_vec()?)
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Returns the sentence nearest to sentence `i`, and how near.
fn nearest(rows: &[Row], i: usize) -> (usize, f32) {
    (0..rows.len())
        .filter(|&j| j != i)
        .map(|j| (j, cosine(&rows[i].embedding, &rows[j].embedding)))
        .fold(
            (i, f32::MIN),
            |best, next| if next.1 > best.1 { next } else { best },
        )
}

/// Returns the lowest cosine between an embedding and eager's of the same sentence.
fn agreement(rows: &[Row], path: &Path) -> Result<f32> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let file = SafeTensors::deserialize(&bytes)?;
    let eager = file.tensor("embeddings")?;
    let width = rows[0].embedding.len();
    ensure!(
        eager.shape() == [rows.len(), width],
        "`{}` has embeddings of other sentences",
        path.display()
    );
    let values: Vec<f32> = eager
        .data()
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    Ok(rows
        .iter()
        .zip(values.chunks_exact(width))
        .map(|(row, want)| cosine(&row.embedding, want))
        .fold(1.0, f32::min))
}

fn print_human(rows: &[Row], nearest: &[(usize, f32)], load_ms: f64, agreement: Option<f32>) {
    println!("loaded minilm in {load_ms:.0} ms\n");
    println!(
        "tokens  bucket            padding      ms  similarity  sentence, and the one nearest to it"
    );
    for (row, &(near, similarity)) in rows.iter().zip(nearest) {
        let Row {
            tokens,
            bucket,
            padding,
            ms,
            ..
        } = row;
        println!(
            "{tokens:>6}  {bucket:<16}  {:>6.0}%  {ms:>6.1}  {similarity:>10.4}  {}",
            padding * 100.0,
            short(&row.text)
        );
        println!("{:>55}{}", "", short(&rows[near].text));
    }
    if let Some(cosine) = agreement {
        let verdict = if cosine < AGREES {
            "DISAGREES with"
        } else {
            "agrees with"
        };
        println!(
            "\n{verdict} eager: lowest cosine {cosine:.6} over {} sentences, {AGREES} needed",
            rows.len()
        );
    }
}

fn print_json(rows: &[Row], nearest: &[(usize, f32)], load_ms: f64, agreement: Option<f32>) {
    let sentences: Vec<_> = rows
        .iter()
        .zip(nearest)
        .map(|(row, &(near, similarity))| {
            json!({
                "text": row.text,
                "tokens": row.tokens,
                "bucket": row.bucket,
                "padding": row.padding,
                "ms": row.ms,
                "nearest": rows[near].text,
                "similarity": similarity,
            })
        })
        .collect();
    let document = json!({
        "schema": 1,
        "load_ms": load_ms,
        "sentences": sentences,
        "eager": agreement.map(|cosine| json!({
            "lowest_cosine": cosine, "needed": AGREES, "agrees": cosine >= AGREES,
        })),
    });
    println!("{document:#}");
}

/// Returns the beginning of a sentence.
fn short(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_owned(),
    }
}
