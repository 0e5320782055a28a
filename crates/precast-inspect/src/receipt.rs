//! Summaries of receipts: the figures that `show` and `report` print.
//!
//! [`record::receipt`](precast_store::record::receipt) lists the fields of a receipt. Any figure may be absent.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::words::time;

use precast_store::{
    Digest,
    record::{
        Faster, Program, SignTest, Tried,
        receipt::{Compared, Gate, Truth},
    },
};

/// The error of one output against eager.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OutputError {
    /// Name of the output.
    pub name: String,
    /// Of integers: equal or not built. The numbers are absent then.
    pub exact: bool,
    /// Largest absolute difference of an element.
    pub max_abs: f64,
    /// Largest difference of an element relative to eager's.
    pub max_rel: f64,
    /// Cosine of the angle between the output and eager's, both as vectors.
    pub cosine: f64,
    /// Relative tolerance that was applied.
    pub rtol: f64,
    /// Absolute tolerance that was applied.
    pub atol: f64,
    /// Distances from the truth, where these decided and no tolerance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truth: Option<Truth>,
}

impl OutputError {
    fn of(output: &Compared) -> Self {
        let number = |value: Option<f64>| value.unwrap_or(0.0);
        Self {
            name: output.name.clone(),
            exact: output.max_abs.is_none(),
            max_abs: number(output.max_abs),
            max_rel: number(output.max_rel),
            cosine: output.cosine.unwrap_or(1.0),
            rtol: number(output.rtol),
            atol: number(output.atol),
            truth: output.truth,
        }
    }

    /// Returns the maximum share of its tolerance that an element uses: 1 is the limit.
    ///
    /// An element with error `e` against `x` passes when `e <= atol + rtol * |x|`, and `e` is at most the largest
    /// absolute error and at most the largest relative error times `|x|`.
    pub fn used(&self) -> f64 {
        if self.exact {
            return 0.0;
        }
        let share = |error: f64, limit: f64| {
            if limit > 0.0 {
                error / limit
            } else {
                f64::INFINITY
            }
        };
        share(self.max_abs, self.atol).min(share(self.max_rel, self.rtol))
    }
}

/// Seconds a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Latency {
    /// Median of the calls.
    pub median: f64,
}

/// The receipt of a program in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReceiptSummary {
    /// Phase -> seconds.
    pub seconds: BTreeMap<String, f64>,
    /// The error of each output, in the order of the program's outputs.
    pub outputs: Vec<OutputError>,
    /// Whether all runs of the gate gave the same bits; absent without a gate.
    pub deterministic: Option<bool>,
    /// Of eager, without Python where that was measured.
    pub eager: Option<Latency>,
    /// Of the program's artifacts.
    pub artifact: Option<Latency>,
    /// Whether eager answers instead of the artifact because it is faster.
    pub slower: bool,
    /// The measurement that decided it.
    pub sign_test: Option<SignTest>,
    /// Whether other values in the padding than the spec's change the answer.
    pub sensitive: Option<bool>,
    /// Peak bytes of eager and of the artifact.
    pub memory: Option<(u64, u64)>,
    /// Option sets that it was compiled with, the module's own first; empty if there was only one.
    pub tuned: Vec<Tried>,
    /// The program whose choice it uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tuned_by: Option<Digest>,
    /// The program whose gate it uses, if it was not gated itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gated_by: Option<Digest>,
    /// Seconds since 1970.
    pub finished: Option<i64>,
}

impl ReceiptSummary {
    /// Reads the receipt of a program.
    pub fn of(program: &Program) -> Self {
        let receipt = &program.receipt;
        let no_gate = Gate::default();
        let gate = receipt.gate.as_ref().unwrap_or(&no_gate);
        let eager_bytes = gate.eager_peak_bytes.or(receipt.eager_peak_bytes);
        let outputs = gate.outputs.iter().flatten();
        let latency = |micros: f64| Latency {
            median: micros / 1e6,
        };
        let eager = gate.eager_us.or(receipt.eager_us).map(latency);
        let measured = gate.artifact_us.map(latency);
        let bytes = gate.artifact_peak_bytes;
        // The gate of a program that eager runs measures eager itself.
        let (eager, artifact, memory) = if program.steps.is_empty() {
            (eager.or(measured), None, None)
        } else {
            (eager, measured, eager_bytes.zip(bytes))
        };
        Self {
            seconds: receipt.seconds.clone(),
            outputs: outputs.map(OutputError::of).collect(),
            deterministic: gate.deterministic,
            eager,
            artifact,
            slower: program.slower_than_eager(),
            sign_test: receipt.sign_test().cloned(),
            sensitive: receipt.padding.as_ref().map(|padding| padding.sensitive),
            memory,
            tuned: receipt.tried().to_vec(),
            tuned_by: receipt.tuned_by,
            gated_by: receipt.gated_by,
            finished: program.provenance.created,
        }
    }

    /// Returns the ratio of eager's time to its time.
    pub fn speedup(&self) -> Option<f64> {
        let (eager, artifact) = (self.eager?.median, self.artifact?.median);
        (artifact > 0.0).then(|| eager / artifact)
    }

    /// Returns the share of the tolerance that the worst output uses.
    pub fn worst(&self) -> Option<f64> {
        self.outputs.iter().map(OutputError::used).reduce(f64::max)
    }
}

/// Eager in place of the artifacts of a program: whose calls, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Instead {
    /// Its module and bucket.
    pub program: String,
    /// Seconds of a call by eager.
    pub eager: Option<f64>,
    /// Seconds of a call by the artifacts.
    pub artifact: Option<f64>,
    /// The measurement that decided it.
    pub sign_test: SignTest,
}

impl Instead {
    /// Returns none for a program that its artifacts answer.
    pub fn of(program: &Program) -> Option<Self> {
        let sign_test = program.receipt.sign_test()?.clone();
        program.is_answered_by_eager().then(|| Self {
            program: format!("{} {}", program.module, program.bucket()),
            eager: program.seconds(true),
            artifact: program.seconds(false),
            sign_test,
        })
    }
}

impl fmt::Display for Instead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "eager answers {} in place of its artifact", self.program)?;
        if let (Some(eager), Some(artifact)) = (self.eager, self.artifact) {
            let (ratio, eager, artifact) = (artifact / eager, time(eager), time(artifact));
            write!(
                f,
                ": {eager} a call instead of {artifact}, {ratio:.2}× as fast"
            )?;
        }
        write!(f, "; it was {}", rounds(&self.sign_test))
    }
}

/// Returns one line with the comparison of artifact and eager, and its outcome.
pub fn decided(test: &SignTest) -> String {
    let answer = match test.faster {
        Faster::Eager => ": eager answers in place of the artifact",
        Faster::Artifact => ": the artifact answers",
        Faster::Neither => ", which decides nothing: the artifact answers",
    };
    let answer = match (test.faster, test.busy_us) {
        (Faster::Neither, Some(busy)) => beside(busy),
        _ => answer.to_owned(),
    };
    format!("eager was {}{answer}", rounds(test))
}

/// Returns what busy threads decided.
fn beside([artifact, eager]: [f64; 2]) -> String {
    format!(
        ", but took {:.1} ms beside busy threads, and the artifact {:.1} ms: the artifact answers",
        eager / 1e3,
        artifact / 1e3
    )
}

/// Returns `faster in 28 of 30 rounds`.
fn rounds(test: &SignTest) -> String {
    let (wins, rounds) = (test.eager_faster, test.rounds);
    let s = if rounds == 1 { "" } else { "s" };
    let alone = if test.exclusive {
        ", with nothing else to do"
    } else {
        ""
    };
    format!("faster in {wins} of {rounds} round{s}{alone}")
}

/// Returns one line with the chosen option set and the reason; none without a choice.
pub fn choice(tuned: &[Tried]) -> Option<String> {
    let first = tuned.first()?;
    let chosen = tuned.iter().find(|tried| tried.chosen)?;
    let (kept, sets, other) = (&chosen.options, tuned.len(), &first.options);
    let why = match (&first.refused, chosen.latency.zip(first.latency)) {
        _ if chosen == first => "no other is clearly faster".to_owned(),
        (Some(_), _) => format!("the fastest that can be without `{other}`"),
        (None, Some((own, first))) => format!("{:.2}× as fast as `{other}`", first / own),
        (None, None) => "the fastest".to_owned(),
    };
    let refused = match tuned.iter().filter(|tried| tried.refused.is_some()).count() {
        0 => String::new(),
        some => format!(", {some} refused"),
    };
    Some(format!(
        "kept `{kept}`, {why} ({sets} option sets{refused})"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use precast_store::testing;

    #[test]
    fn what_is_there_is_read_and_the_rest_is_absent() {
        let mut program = testing::program("m", 1, &[Digest::of(b"a")]);
        assert_eq!(ReceiptSummary::of(&program), ReceiptSummary::default());
        program.receipt = testing::read(json!({
            "seconds": {"capture": 2.5},
            "eager_us": 4000.0,
            "gate": {"deterministic": true, "artifact_us": 1000.0, "outputs": [
                {"name": "y", "max_abs": 2e-6, "max_rel": 0.5, "cosine": 1.0, "rtol": 1e-4, "atol": 1e-5},
                {"name": "n", "equal": true},
            ]},
        }));
        let receipt = ReceiptSummary::of(&program);
        let of = |receipt: &Value| {
            let mut program = testing::program("m", 1, &[Digest::of(b"a")]);
            program.receipt = testing::read(receipt.clone());
            ReceiptSummary::of(&program)
        };
        let mut other =
            json!({"eager_us": 300.0, "eager_peak_bytes": 9, "gate": {"artifact_us": 100.0}});
        assert_eq!(of(&other).memory, None, "of one alone it says nothing");
        other["gate"]["artifact_peak_bytes"] = json!(4);
        assert_eq!(of(&other).memory, Some((9, 4)));
        other["gate"]["eager_peak_bytes"] = json!(8);
        assert_eq!(of(&other).memory, Some((8, 4)));
        assert!(!of(&other).slower, "eager in Python does not count");
        other["gate"]["eager_us"] = json!(80.0);
        assert_eq!(of(&other).speedup(), Some(0.8));
        assert!(!of(&other).slower, "nothing was decided");
        let mut verdict = |faster: &str, rounds: u64, eager_faster: u64, exclusive: bool| {
            other["gate"]["sign_test"] = json!({"rounds": rounds, "eager_faster": eager_faster, "exclusive": exclusive, "faster": faster});
            let receipt = of(&other);
            assert_eq!(receipt.slower, faster == "eager");
            decided(&receipt.sign_test.unwrap())
        };
        insta::assert_snapshot!(verdict("eager", 200, 198, true), @"eager was faster in 198 of 200 rounds, with nothing else to do: eager answers in place of the artifact");
        insta::assert_snapshot!(verdict("artifact", 20, 0, false), @"eager was faster in 0 of 20 rounds: the artifact answers");
        insta::assert_snapshot!(verdict("neither", 1, 1, true), @"eager was faster in 1 of 1 round, with nothing else to do, which decides nothing: the artifact answers");
        let mut busy = of(&other).sign_test.unwrap();
        busy.busy_us = Some([9_600.0, 312_000.0]);
        insta::assert_snapshot!(decided(&busy), @"eager was faster in 1 of 1 round, with nothing else to do, but took 312.0 ms beside busy threads, and the artifact 9.6 ms: the artifact answers");
        other["gate"]["eager_us"] = json!(null);
        let ratio = of(&other).speedup().unwrap();
        assert!((ratio - 3.0).abs() < 1e-9, "{ratio}");
        assert_eq!(receipt.seconds.len(), 1);
        assert_eq!(receipt.speedup(), Some(4.0));
        assert!((receipt.worst().unwrap() - 0.2).abs() < 1e-9);
        assert!(receipt.outputs[1].exact);
    }

    #[test]
    fn a_program_that_eager_runs_is_not_compared_with_eager() {
        let mut program = testing::program("m", 1, &[]);
        for (eager, artifact) in [(None, 1000.0), (Some(1000.0), 2000.0)] {
            program.receipt = testing::read(json!({
                "eager_us": eager,
                "gate": {"artifact_us": artifact, "eager_peak_bytes": 9, "artifact_peak_bytes": 4},
            }));
            let receipt = ReceiptSummary::of(&program);
            assert_eq!(receipt.eager.map(|eager| eager.median), Some(0.001));
            assert_eq!((receipt.artifact, receipt.memory), (None, None));
            assert_eq!(receipt.speedup(), None);
        }
    }

    #[test]
    fn a_choice_says_what_it_was_made_by() {
        let row = |options: &str, latency: Option<f64>, refused: Option<&str>| json!({"options": options, "latency": latency, "refused": refused, "chosen": false});
        let tried = |rows: Vec<Value>| -> Vec<Tried> { testing::read(json!(rows)) };
        let summary = |mut rows: Vec<Value>, chosen: usize| {
            rows[chosen]["chosen"] = true.into();
            choice(&tried(rows)).unwrap()
        };
        let base = row("mode=default", Some(0.003), None);
        let other = row("epilogue_fusion=false", Some(0.002), None);
        let bad = |name: &str| row(name, None, Some("it does not end"));
        insta::assert_snapshot!(summary(vec![base.clone(), other.clone()], 0), @"kept `mode=default`, no other is clearly faster (2 option sets)");
        insta::assert_snapshot!(summary(vec![base.clone(), other.clone(), bad("x")], 1), @"kept `epilogue_fusion=false`, 1.50× as fast as `mode=default` (3 option sets, 1 refused)");
        insta::assert_snapshot!(summary(vec![bad("mode=default"), other], 1), @"kept `epilogue_fusion=false`, the fastest that can be without `mode=default` (2 option sets, 1 refused)");
        assert_eq!(choice(&[]), None);
        assert_eq!(choice(&tried(vec![base])), None);
    }
}
