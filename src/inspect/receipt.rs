//! What was measured when something was built, read out of the records.
//!
//! A receipt is JSON whose fields come and go as builds learn to measure more, so that everything here may be absent:
//!
//! | record | field | is |
//! |---|---|---|
//! | program | `seconds` | phase -> seconds (`capture`, `gate`, …) |
//! | program | `gate.outputs[]` | `name`, and `max_abs`, `max_rel`, `cosine`, `rtol`, `atol`, or `equal` |
//! | program | `gate.deterministic` | whether two runs gave the same bits |
//! | program | `gate.artifact_us`, `gate.eager_us` | median microseconds of a call, by turns: of the artifacts, and of the exported graph without Python |
//! | program | `gate.turns` | what those calls came to: `rounds`, `eager_faster` of them, whether the build was at nothing else (`alone`), and which is the `faster` one: `artifact`, `eager` or `neither` |
//! | program | `eager_us` | the same of eager in Python, measured beside whatever the build was at: only where there is nothing better |
//! | program | `gate.padding` | what the runtime made of smaller requests: `points`, `max_abs`, and `refused` where it was wrong |
//! | program | `latency.eager`, `latency.artifact` | the same in seconds, with `median`, `low` and `high` |
//! | program | `gate.artifact_peak_bytes`, `gate.eager_peak_bytes` | what a call takes of memory at most, beyond what its process had; null where that is not known |
//! | program | `eager_peak_bytes` | the same of eager in Python, on CUDA |
//! | program | `tuned[]` | the option sets it was compiled with, the one to beat first: `options`, `seconds` to compile, `latency` by turns, `max_abs`, `chosen`, `refused` |
//! | program | `gate_given` | what the gate looked at beside the program: samples, weights, tolerances, host, … |
//! | program | `gated_by` | the program whose gate it is, where that looked at the same things and was not repeated |
//! | program | `tuned_by` | the program that was tuned, where its choice was taken over |
//! | artifact | `seconds` | phase -> seconds (`lower`, `cpp`, `link`, …) |
//! | both | `provenance.created` | when it was finished, in seconds since 1970 |

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::{
    Digest,
    record::{Artifact, Faster, Program, Turns},
};

/// The error of one output against eager.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OutputError {
    pub name: String,
    /// Of integers: equal or not built. The numbers are absent then.
    pub exact: bool,
    pub max_abs: f64,
    pub max_rel: f64,
    pub cosine: f64,
    pub rtol: f64,
    pub atol: f64,
}

impl OutputError {
    /// Returns which share of its tolerance the worst element uses at most: 1 is the limit.
    ///
    /// An element with error `e` against `x` passes when `e <= atol + rtol * |x|`, and `e` is at most the largest
    /// absolute error and at most the largest relative error times `|x|`.
    pub fn used(&self) -> f64 {
        if self.exact {
            return 0.0;
        }
        let share = |error: f64, limit: f64| match limit > 0.0 {
            true => error / limit,
            false => f64::INFINITY,
        };
        share(self.max_abs, self.atol).min(share(self.max_rel, self.rtol))
    }
}

/// Seconds a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    pub median: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
}

/// One option set that a program was compiled with, to keep the fastest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// How it differs from the module's own settings.
    pub options: String,
    /// Seconds its artifacts took to compile.
    pub seconds: Option<f64>,
    /// Seconds a call takes, measured by turns.
    pub latency: Option<f64>,
    pub max_abs: Option<f64>,
    pub chosen: bool,
    /// Why it could not be chosen.
    pub refused: Option<String>,
}

/// The receipt of a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Receipt {
    /// Phase -> seconds.
    pub seconds: BTreeMap<String, f64>,
    pub outputs: Vec<OutputError>,
    pub deterministic: Option<bool>,
    pub eager: Option<Latency>,
    pub artifact: Option<Latency>,
    /// Whether eager is to answer in the artifact's place, being faster.
    pub slower: bool,
    /// By what that was decided.
    pub turns: Option<Turns>,
    /// Whether other values in the padding than the spec's change the answer.
    pub sensitive: Option<bool>,
    /// Peak bytes of eager and of the artifact.
    pub memory: Option<(u64, u64)>,
    pub tuned: Vec<Tried>,
    /// The program whose choice was taken over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tuned_by: Option<Digest>,
    /// The program whose gate it is, where it was not gated again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gated_by: Option<Digest>,
    /// Seconds since 1970.
    pub finished: Option<i64>,
}

impl Receipt {
    /// Reads the receipt of a program.
    pub fn of(program: &Program) -> Self {
        let receipt = &program.receipt;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let gate = &receipt["gate"];
        let (eager, artifact) = (
            &receipt["latency"]["eager"],
            &receipt["latency"]["artifact"],
        );
        let eager_bytes = gate["eager_peak_bytes"].as_u64();
        let eager_bytes = eager_bytes.or_else(|| receipt["eager_peak_bytes"].as_u64());
        Self {
            seconds: phases(&receipt["seconds"]),
            outputs: list(&gate["outputs"]).iter().map(output).collect(),
            deterministic: gate["deterministic"].as_bool(),
            eager: latency(eager)
                .or_else(|| micros(&gate["eager_us"]))
                .or_else(|| micros(&receipt["eager_us"])),
            artifact: latency(artifact).or_else(|| micros(&gate["artifact_us"])),
            slower: program.slower_than_eager(),
            turns: program.turns(),
            sensitive: receipt["padding"]["sensitive"].as_bool(),
            memory: eager_bytes.zip(gate["artifact_peak_bytes"].as_u64()),
            tuned: tried(&list(&receipt["tuned"])),
            tuned_by: receipt["tuned_by"].as_str().and_then(|id| id.parse().ok()),
            gated_by: receipt["gated_by"].as_str().and_then(|id| id.parse().ok()),
            finished: program.provenance["created"].as_i64(),
        }
    }

    /// Returns how many times as fast as eager it is.
    pub fn speedup(&self) -> Option<f64> {
        let (eager, artifact) = (self.eager?.median, self.artifact?.median);
        (artifact > 0.0).then(|| eager / artifact)
    }

    /// Returns the share of the tolerance that the worst output uses.
    pub fn worst(&self) -> Option<f64> {
        self.outputs.iter().map(OutputError::used).reduce(f64::max)
    }
}

/// Returns the seconds of each phase of an artifact's compile.
pub fn compile_seconds(artifact: &Artifact) -> BTreeMap<String, f64> {
    phases(&artifact.receipt["seconds"])
}

/// Returns when an artifact was finished, in seconds since 1970.
pub fn finished(artifact: &Artifact) -> Option<i64> {
    artifact.provenance["created"].as_i64()
}

/// Reads the option sets that a receipt, or an event of a build, has.
pub fn tried(rows: &[Value]) -> Vec<Tried> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let one = |row: &Value| Tried {
        options: text(&row["options"]).unwrap_or_else(|| "default".to_owned()),
        seconds: row["seconds"].as_f64(),
        latency: row["latency"].as_f64(),
        max_abs: row["max_abs"].as_f64(),
        chosen: row["chosen"].as_bool().unwrap_or(false),
        refused: text(&row["refused"]),
    };
    rows.iter().map(one).collect()
}

/// Says in one line what artifact and eager came to by turns, and which of them answers.
pub fn decided(turns: &Turns) -> String {
    let rounds = match turns.rounds {
        1 => "1 round".to_owned(),
        rounds => format!("{rounds} rounds"),
    };
    let beside = match turns.alone {
        true => ", with nothing else to do",
        false => "",
    };
    let least = format!(
        "eager was faster in {} of {rounds}{beside}",
        turns.eager_faster
    );
    match turns.faster {
        Faster::Eager => format!("{least}: eager answers in place of the artifact"),
        Faster::Artifact => format!("{least}: the artifact answers"),
        Faster::Neither => format!("{least}, which decides nothing: the artifact answers"),
    }
}

/// Says in one line which of several option sets was kept and why; none where nothing was chosen.
pub fn choice(tuned: &[Tried]) -> Option<String> {
    let first = tuned.first()?;
    let chosen = tuned.iter().find(|tried| tried.chosen)?;
    let why = match (
        chosen == first,
        chosen.latency.zip(first.latency),
        &first.refused,
    ) {
        (true, _, _) => "no other is clearly faster".to_owned(),
        (false, _, Some(_)) => format!("the fastest that can be without `{}`", first.options),
        (false, Some((latency, before)), None) => {
            format!("{:.2}× as fast as `{}`", before / latency, first.options)
        }
        (false, None, None) => "the fastest".to_owned(),
    };
    let refused = tuned.iter().filter(|tried| tried.refused.is_some()).count();
    let refused = match refused {
        0 => String::new(),
        some => format!(", {some} refused"),
    };
    let (kept, sets) = (&chosen.options, tuned.len());
    Some(format!(
        "kept `{kept}`, {why} ({sets} option sets{refused})"
    ))
}

fn phases(value: &Value) -> BTreeMap<String, f64> {
    match value {
        Value::Object(map) => {
            let seconds = map
                .iter()
                .filter_map(|(name, s)| Some((name.clone(), s.as_f64()?)));
            seconds
                .filter(|(_, s)| s.is_finite() && *s >= 0.0)
                .collect()
        }
        Value::Number(number) => {
            let seconds = number.as_f64().unwrap_or(0.0);
            BTreeMap::from([("compile".to_owned(), seconds)])
        }
        _ => BTreeMap::new(),
    }
}

fn output(value: &Value) -> OutputError {
    let number = |name: &str| value[name].as_f64().unwrap_or(0.0);
    OutputError {
        name: value["name"].as_str().unwrap_or("output").to_owned(),
        exact: value["max_abs"].is_null(),
        max_abs: number("max_abs"),
        max_rel: number("max_rel"),
        cosine: value["cosine"].as_f64().unwrap_or(1.0),
        rtol: number("rtol"),
        atol: number("atol"),
    }
}

fn latency(value: &Value) -> Option<Latency> {
    let plain = value.as_f64().map(|median| Latency {
        median,
        low: None,
        high: None,
    });
    plain.or_else(|| {
        Some(Latency {
            median: value["median"].as_f64()?,
            low: value["low"].as_f64(),
            high: value["high"].as_f64(),
        })
    })
}

fn micros(value: &Value) -> Option<Latency> {
    let median = value.as_f64()? / 1e6;
    Some(Latency {
        median,
        low: None,
        high: None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::testing;

    #[test]
    fn what_is_there_is_read_and_the_rest_is_absent() {
        let mut program = testing::program("m", 1, &[]);
        assert_eq!(Receipt::of(&program), Receipt::default());
        program.receipt = json!({
            "seconds": {"capture": 2.5, "odd": "x"},
            "latency": {"eager": 0.004, "artifact": {"median": 0.001, "low": 0.0009}},
            "gate": {"deterministic": true, "outputs": [
                {"name": "y", "max_abs": 2e-6, "max_rel": 0.5, "cosine": 1.0, "rtol": 1e-4, "atol": 1e-5},
                {"name": "n", "equal": true},
            ]},
        });
        let receipt = Receipt::of(&program);
        let mut other = testing::program("m", 1, &[]);
        other.receipt =
            json!({"eager_us": 300.0, "eager_peak_bytes": 9, "gate": {"artifact_us": 100.0}});
        assert_eq!(
            Receipt::of(&other).memory,
            None,
            "of one alone it says nothing"
        );
        other.receipt["gate"]["artifact_peak_bytes"] = json!(4);
        assert_eq!(Receipt::of(&other).memory, Some((9, 4)));
        other.receipt["gate"]["eager_peak_bytes"] = json!(8);
        assert_eq!(Receipt::of(&other).memory, Some((8, 4)));
        assert!(
            !Receipt::of(&other).slower,
            "eager in Python does not count"
        );
        other.receipt["gate"]["eager_us"] = json!(80.0);
        assert_eq!(Receipt::of(&other).speedup(), Some(0.8));
        assert!(!Receipt::of(&other).slower, "nothing was decided");
        let mut told = |faster: &str, rounds: u64, eager_faster: u64, alone: bool| {
            other.receipt["gate"]["turns"] = json!({"rounds": rounds, "eager_faster": eager_faster, "alone": alone, "faster": faster});
            let receipt = Receipt::of(&other);
            assert_eq!(receipt.slower, faster == "eager");
            decided(&receipt.turns.unwrap())
        };
        insta::assert_snapshot!(told("eager", 200, 198, true), @"eager was faster in 198 of 200 rounds, with nothing else to do: eager answers in place of the artifact");
        insta::assert_snapshot!(told("artifact", 20, 0, false), @"eager was faster in 0 of 20 rounds: the artifact answers");
        insta::assert_snapshot!(told("neither", 1, 1, true), @"eager was faster in 1 of 1 round, with nothing else to do, which decides nothing: the artifact answers");
        other.receipt["gate"]["eager_us"] = json!(null);
        let ratio = Receipt::of(&other).speedup().unwrap();
        assert!((ratio - 3.0).abs() < 1e-9, "{ratio}");
        assert_eq!(receipt.seconds.len(), 1);
        assert_eq!(receipt.speedup(), Some(4.0));
        assert!((receipt.worst().unwrap() - 0.2).abs() < 1e-9);
        assert!(receipt.outputs[1].exact);
    }

    #[test]
    fn a_choice_says_what_it_was_made_by() {
        let row = |options: &str, latency: Option<f64>, refused: Option<&str>| json!({"options": options, "latency": latency, "refused": refused});
        let told = |mut rows: Vec<Value>, chosen: usize| {
            rows[chosen]["chosen"] = true.into();
            choice(&tried(&rows)).unwrap()
        };
        let base = row("mode=default", Some(0.003), None);
        let other = row("epilogue_fusion=false", Some(0.002), None);
        let bad = |name: &str| row(name, None, Some("it does not end"));
        insta::assert_snapshot!(told(vec![base.clone(), other.clone()], 0), @"kept `mode=default`, no other is clearly faster (2 option sets)");
        insta::assert_snapshot!(told(vec![base.clone(), other.clone(), bad("x")], 1), @"kept `epilogue_fusion=false`, 1.50× as fast as `mode=default` (3 option sets, 1 refused)");
        insta::assert_snapshot!(told(vec![bad("mode=default"), other], 1), @"kept `epilogue_fusion=false`, the fastest that can be without `mode=default` (2 option sets, 1 refused)");
        assert_eq!(choice(&[]), None);
        assert_eq!(choice(&tried(&[base])), None);
    }
}
