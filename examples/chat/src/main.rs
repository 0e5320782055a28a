//! Answers a question with SmolLM2-135M-Instruct, compiled by `precast build`: no Python here.
//!
//! ```console
//! $ precast build -f examples/chat/precast.toml
//! $ chat "Name three uses of a paper clip."
//! ```
//!
//! One session holds the cache of the conversation. The prompt goes through `prefill`, each further token through
//! `decode`; both choose the next token themselves, so that one number comes back. `make chat` does all of it from
//! nothing.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints its answer"
)]

use std::{
    fs,
    io::{self, BufRead, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use clap::{Parser, ValueEnum};
use precast_runtime::{Device, Model, Outputs, Runtime, RuntimeError, Session, Store, Value};
use serde_json::Value as Json;
use tokenizers::Tokenizer;

const SYSTEM: &str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

#[derive(Parser)]
#[command(about = "Answers a question with a compiled language model")]
struct Args {
    /// The question
    question: Option<String>,
    /// Go on after the answer: each further line is a question in the same conversation. Takes newer weights while it runs
    #[arg(long)]
    interactive: bool,
    /// The longest answer, in tokens
    #[arg(long, default_value_t = 256)]
    tokens: usize,
    /// 0 for the likeliest token; higher for more variety
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Choose among so many tokens, 50 at most
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=50))]
    top_k: i64,
    /// Choose among the likeliest tokens of this share
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The store that `precast build` filled
    #[arg(long, default_value = "artifacts", value_name = "DIR")]
    store: PathBuf,
    /// The folder of the package `torch`
    #[arg(long, env = "LIBTORCH", value_name = "DIR")]
    libtorch: Option<PathBuf>,
    /// The file `tokenizer.json` of the model
    #[arg(
        long,
        default_value = "target/chat/tokenizer.json",
        value_name = "FILE"
    )]
    tokenizer: PathBuf,
    /// Compare with the tokens of this file, as eager.py writes it; the exit code is 1 when they differ
    #[arg(long, value_name = "FILE")]
    eager: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t = On::Cpu)]
    device: On,
}

#[derive(Clone, Copy, ValueEnum)]
enum On {
    Cpu,
    Cuda,
}

/// The settings of one answer.
struct Settings {
    tokens: usize,
    temperature: f32,
    top_k: i64,
    top_p: f32,
    random: Random,
}

/// Tokens of an answer, and the time from the first of them to the last.
struct Answer {
    tokens: Vec<i64>,
    took: Duration,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let device = match args.device {
        On::Cpu => Device::Cpu,
        On::Cuda => Device::Cuda(0),
    };
    let tokenizer = Tokenizer::from_file(&args.tokenizer)
        .map_err(|error| anyhow!("{error}"))
        .with_context(|| args.tokenizer.display().to_string())?;
    Runtime::libtorch(args.libtorch.as_deref(), false)?;
    let store = Store::open(&args.store)?;
    let runtime = Runtime::new(&store, device)?;
    let model = runtime.load("smollm2")?;
    let mut settings = Settings {
        tokens: args.tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        random: Random(args.seed),
    };
    if let Some(path) = &args.eager {
        return compare(&mut model.session()?, &tokenizer, &mut settings, path);
    }
    let swapped = AtomicU64::new(0);
    let mut talk = Conversation::begin(&model, &swapped, &tokenizer, settings)?;
    if let Some(question) = &args.question {
        talk.turn(question)?;
    }
    if args.interactive || args.question.is_none() {
        thread::scope(|scope| {
            // Its end, by return or by error, ends the thread.
            let (_end, ended) = mpsc::channel();
            let (store, runtime, model, swapped) = (&store, &runtime, &model, &swapped);
            scope.spawn(move || take_new_weights(store, runtime, model, swapped, &ended));
            let lines = io::stdin().lock().lines();
            lines
                .map_while(Result::ok)
                .try_for_each(|line| match line.trim() {
                    "" => Ok(()),
                    question => talk.turn(question),
                })
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Looks for a newer release of the model each second, as training publishes it, swaps its weights in, and writes its
/// number to `swapped`. An answer under way keeps its weights.
fn take_new_weights(
    store: &Store,
    runtime: &Runtime,
    model: &Model,
    swapped: &AtomicU64,
    ended: &Receiver<()>,
) {
    let mut refused = None;
    while ended.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
        let Ok(Some(newest)) = store.releases().get(model.name(), None) else {
            continue;
        };
        if newest.weights == model.weights() || newest.weights == refused {
            continue;
        }
        let weights = runtime.weights_of(model.name());
        match weights.and_then(|weights| model.swap(&weights)) {
            Ok(()) => {
                eprintln!("(release {} has new weights)", newest.seq);
                swapped.store(newest.seq, Ordering::Release);
            }
            Err(error) => {
                eprintln!("(the weights of release {} don't fit: {error})", newest.seq);
                refused = newest.weights;
            }
        }
    }
}

/// Questions and answers in one session.
struct Conversation<'m> {
    model: &'m Model,
    tokenizer: &'m Tokenizer,
    settings: Settings,
    session: Session<'m>,
    /// The number of the release that was swapped in last, now and when the session began.
    swapped: &'m AtomicU64,
    release: u64,
    first: bool,
}

impl<'m> Conversation<'m> {
    fn begin(
        model: &'m Model,
        swapped: &'m AtomicU64,
        tokenizer: &'m Tokenizer,
        settings: Settings,
    ) -> Result<Self> {
        Ok(Self {
            model,
            tokenizer,
            settings,
            // Before the session, so that a swap between the two is noticed.
            release: swapped.load(Ordering::Acquire),
            swapped,
            session: model.session()?,
            first: true,
        })
    }

    /// Prints the answer to a question. New weights begin a new conversation: a session keeps those that it began with.
    fn turn(&mut self, question: &str) -> Result<()> {
        let release = self.swapped.load(Ordering::Acquire);
        if release != self.release {
            self.release = release;
            self.session = self.model.session()?;
            self.first = true;
            eprintln!("(a new conversation, with the new weights)");
        }
        let prompt = encode(self.tokenizer, &asked(question, self.first))?;
        self.first = false;
        let mut printer = Printer::new(self.tokenizer);
        let answer = answer(&mut self.session, &prompt, &mut self.settings, |token| {
            printer.token(token)
        })?;
        let rate = answer.tokens.len().saturating_sub(1) as f64 / answer.took.as_secs_f64();
        println!();
        eprintln!("({} tokens, {rate:.1} a second)", answer.tokens.len());
        Ok(())
    }
}

/// Returns a question as the model was trained on it. The first one follows the system's line, a later one the answer
/// before it.
fn asked(question: &str, first: bool) -> String {
    let before = if first {
        format!("<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    } else {
        "<|im_end|>\n".to_owned()
    };
    format!("{before}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<i64>> {
    let encoding = tokenizer.encode(text, false);
    let encoding = encoding.map_err(|error| anyhow!("{error}"))?;
    Ok(encoding.get_ids().iter().map(|&id| id.into()).collect())
}

/// Generates the answer to a prompt, to the end of the turn or the longest answer.
fn answer(
    session: &mut Session<'_>,
    prompt: &[i64],
    settings: &mut Settings,
    mut each: impl FnMut(i64) -> Result<()>,
) -> Result<Answer> {
    // <|im_end|>
    const END: i64 = 2;
    let out = session.prefill(prompt, &settings.choice()?)?;
    let started = Instant::now();
    let mut tokens = vec![token(&out)?];
    while let Some(&last) = tokens.last()
        && last != END
    {
        each(last)?;
        if tokens.len() == settings.tokens {
            break;
        }
        tokens.push(token(&session.decode(last, &settings.choice()?)?)?);
    }
    Ok(Answer {
        tokens,
        took: started.elapsed(),
    })
}

fn token(out: &Outputs) -> Result<i64, RuntimeError> {
    Ok(out.array_named::<i64>("token")?.data()[0])
}

impl Settings {
    /// Returns the inputs that say how the next token is chosen.
    fn choice(&mut self) -> Result<[Value; 4], RuntimeError> {
        Ok([
            Value::new(&[self.temperature], &[1])?,
            Value::new(&[self.top_k], &[1])?,
            Value::new(&[self.top_p], &[1])?,
            Value::new(&[self.random.next()], &[1])?,
        ])
    }
}

/// Random numbers from 0 to 1: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1_u64 << 24) as f32
    }
}

/// Prints tokens as they come. A character may need several of them.
struct Printer<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<u32>,
    shown: usize,
}

impl<'t> Printer<'t> {
    fn new(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            tokens: Vec::new(),
            shown: 0,
        }
    }

    fn token(&mut self, token: i64) -> Result<()> {
        self.tokens.push(u32::try_from(token)?);
        let text = self.tokenizer.decode(&self.tokens, true);
        let text = text.map_err(|error| anyhow!("{error}"))?;
        if let Some(new) = text.get(self.shown..)
            && !new.ends_with('\u{fffd}')
        {
            print!("{new}");
            io::stdout().flush()?;
            self.shown = text.len();
        }
        Ok(())
    }
}

/// Answers the prompts of a file as `generate` did, and compares token by token.
fn compare(
    session: &mut Session<'_>,
    tokenizer: &Tokenizer,
    settings: &mut Settings,
    path: &Path,
) -> Result<ExitCode> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let eager: Json = serde_json::from_str(&text)?;
    let (mut equal, mut all, mut seconds) = (0, 0, 0.0);
    let answers = eager["answers"].as_array().context("no `answers`")?;
    for one in answers {
        let question = one["question"].as_str().context("no `question`")?;
        let wanted: Vec<i64> = serde_json::from_value(one["tokens"].clone())?;
        settings.tokens = wanted.len();
        session.reset();
        let prompt = encode(tokenizer, &asked(question, true))?;
        let own = answer(session, &prompt, settings, |_| Ok(()))?;
        let same = own.tokens == wanted;
        println!("{} {question}", if same { "equal " } else { "DIFFERS" });
        if !same {
            println!("  eager {wanted:?}\n  chat  {:?}", own.tokens);
        }
        equal += usize::from(same);
        all += own.tokens.len() - 1;
        seconds += own.took.as_secs_f64();
    }
    let (rate, theirs) = (all as f64 / seconds, eager["rate"].as_f64().unwrap_or(0.0));
    println!(
        "{equal} of {} answers are `generate`'s, token by token; {rate:.1} tokens a second, eager {theirs:.1}: {:.2} times as fast",
        answers.len(),
        rate / theirs
    );
    Ok(if equal == answers.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
