//! The truth: what judges a value that rounding alone moves further than a tolerance would allow.
//!
//! Two right programs differ by rounding. In half precision that is as much as many a fault makes: a BERT in bfloat16 is
//! 1.2 % of its output's norm from the same weights in float32, and so is every other program, in another direction.
//! Some steps amplify rounding in float32 too: a batch norm over few values divides by a small deviation, AdamW divides
//! a tiny gradient by its own size. The question is then whether the artifact is further from the truth than eager is.
//! So the worker runs the same calls with more digits (`worker/truth.py`).
//!
//! | values of | truth | judge each value | that is beyond its tolerance |
//! |---|---|---|---|
//! | a program in half precision, without tolerances of the spec | float32 | yes | |
//! | another program | float64 | | yes |
//! | a training step, or a half of a pair | float64 | | yes |
//!
//! **Without gradients** a value is right if the norm of its difference from the truth, and the worst element of it, are
//! at most [`TIMES`] eager's. A value that is the truth, rounded once, is right in any case.
//!
//! **In training** a value is right if both hold, each as the root of a mean square over its elements:
//!
//! | condition | why |
//! |---|---|
//! | what its elements differ from float64 beyond their plain tolerance is at most [`TIMES_OF_TRAINING`] eager's distance | eager is as far from the truth |
//! | it differs from float64 by at most [`SHARE`] of the value; or, where eager may too, it is as large as eager's value, within [`SIZES`] | zeros in place of a value, and one with the other sign, are refused; where eager itself is noise, no direction is known, and zeros are still refused |
//!
//! Noise is not rare: by autocast in bfloat16, eager's gradients of a ResNet-50 before its training are further from
//! float64 than zeros would be, and a value of the right size is all that can be asked of any program. The receipt says
//! of which values this is so.
//!
//! Eager's distance comes from several runs, because one number may be right by chance. Shapes, dtypes, integers, NaN
//! and infinity are never accepted so.
//!
//! Where the module can't run with more digits, the tolerances decide, and a refusal has the reason. `verify --host` has
//! no Python: it takes eager's distance from the receipt ([`known`]).

use std::collections::BTreeMap;

use precast_runtime::{Tensor, errors::TorchError};
use precast_store::record::{
    Dtype,
    receipt::{Compared, Truth},
};

/// The largest distance of an artifact without gradients, in distances of eager.
const TIMES: f64 = 2.0;

/// The largest distance of an artifact in training. Of the values beyond their plain tolerance in right steps
/// on a CPU, the furthest was at 1.1 (ResNet-18, float32), 1.3 (the same by autocast) and 2.4 (ResNet-50, float32: the
/// norm of the gradients, and 2.0 among tensors); half of them were below 1.
const TIMES_OF_TRAINING: f64 = 3.0;

/// The largest distance of a value that is no noise, as a share of it.
const SHARE: f64 = 0.9;

/// How many times larger or smaller than eager's a value may be that is noise in eager.
const SIZES: f64 = 2.0;

/// A value with more digits.
pub struct Exact {
    value: Tensor,
    /// In training eager's distance; else a share of the value, by norm and by the worst element.
    eager: Eager,
}

enum Eager {
    Training(f64),
    Shares(f64, f64),
}

/// A refusal, and how many times the limit the value is away.
pub struct Further {
    pub why: String,
    pub excess: f64,
}

/// Takes the values `KIND.0`, `KIND.1` and so on of the worker's file. None for a value that is no float.
pub fn take(
    held: &mut BTreeMap<String, Tensor>,
    kind: &str,
    count: usize,
) -> Result<Vec<Option<Exact>>, TorchError> {
    let names = (0..count).map(|index| format!("{kind}.{index}"));
    let one = |name: String| {
        let Some(value) = held.remove(&name) else {
            return Ok(None);
        };
        let eager = held.remove(&format!("eager.{name}"));
        let eager = eager.map(|eager| eager.to_vec::<f64>()).transpose()?;
        let eager = match eager.as_deref() {
            Some(&[distance]) => Eager::Training(distance),
            Some(&[norm, worst]) => Eager::Shares(norm, worst),
            _ => Eager::Shares(0.0, 0.0),
        };
        Ok(Some(Exact { value, eager }))
    };
    names.map(one).collect()
}

impl Exact {
    /// Returns whether it is a value of a training step, or of a half of a pair.
    pub fn of_training(&self) -> bool {
        matches!(self.eager, Eager::Training(_))
    }

    /// Accepts a value or says why not. `row` has the plain comparison with eager's.
    pub fn judge(&self, got: &Tensor, eager: &Tensor, row: Compared) -> Result<Compared, Further> {
        let failed = |error: TorchError| Further {
            why: format!("can't be compared with the truth: {error}"),
            excess: f64::INFINITY,
        };
        let double = |tensor: &Tensor| tensor.to_dtype(Dtype::Float64)?.to_vec::<f64>();
        let dtype = self.value.dtype().unwrap_or(Dtype::Float64);
        let (value, own) = (
            double(&self.value).map_err(failed)?,
            double(got).map_err(failed)?,
        );
        let eager = double(eager).map_err(failed)?;
        let found = match self.eager {
            Eager::Training(distance) => {
                let tolerances = (row.rtol.unwrap_or(0.0), row.atol.unwrap_or(0.0));
                let size = root(eager.iter().copied());
                judge_training(&own, &value, (distance, size), tolerances)?
            }
            Eager::Shares(norm, worst) => {
                let (size, largest) = (root(value.iter().copied()), largest(value.iter().copied()));
                let other = Distance::between(&eager, &value);
                let other = Distance {
                    norm: other.norm.max(norm * size),
                    worst: other.worst.max(worst * largest),
                };
                judge(&own, &value, other, rounding(got.dtype()), dtype)?
            }
        };
        Ok(Compared {
            truth: Some(Truth { dtype, ..found }),
            ..row
        })
    }
}

/// Accepts a value by what a receipt says of its output: two values that are both right are this far from each other.
pub fn known(truth: &Truth, got: &Tensor, eager: &Tensor) -> Result<bool, TorchError> {
    let double = |tensor: &Tensor| tensor.to_dtype(Dtype::Float64)?.to_vec::<f64>();
    let found = Distance::between(&double(got)?, &double(eager)?);
    let worst = truth.eager_worst.unwrap_or(f64::INFINITY);
    Ok(found.norm <= (1.0 + TIMES) * truth.eager && found.worst <= (1.0 + TIMES) * worst)
}

/// How far two values are from each other.
#[derive(Clone, Copy, Debug)]
struct Distance {
    /// The root of the mean square.
    norm: f64,
    worst: f64,
}

impl Distance {
    /// Elements that are no numbers in the second are left out: the plain comparison has judged them.
    fn between(one: &[f64], other: &[f64]) -> Self {
        let pairs = one.iter().zip(other);
        let each = pairs.filter(|(_, other)| other.is_finite());
        let each: Vec<f64> = each.map(|(one, other)| one - other).collect();
        Self {
            norm: root(each.iter().copied()),
            worst: largest(each.into_iter()),
        }
    }
}

/// The largest relative error of one rounding to a dtype.
fn rounding(dtype: Option<Dtype>) -> f64 {
    let digits = match dtype {
        Some(Dtype::Bfloat16) => 8,
        Some(Dtype::Float16) => 11,
        Some(Dtype::Float32) => 24,
        _ => 53,
    };
    0.5_f64.powi(digits)
}

/// The largest absolute value.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |largest, value| match value.is_nan() {
        true => f64::INFINITY,
        false => largest.max(value.abs()),
    })
}

/// The root of the mean square.
fn root(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    (values.map(|x| x * x).sum::<f64>() / count as f64).sqrt()
}

/// The rule without gradients.
fn judge(
    got: &[f64],
    exact: &[f64],
    eager: Distance,
    rounding: f64,
    dtype: Dtype,
) -> Result<Truth, Further> {
    let finite = || exact.iter().copied().filter(|value| value.is_finite());
    let values: Vec<f64> = finite().collect();
    let size = root(values.iter().copied());
    let own = Distance::between(got, exact);
    let norm = (TIMES * eager.norm).max(rounding * size);
    let worst = (TIMES * eager.worst).max(rounding * largest(finite()));
    let comparable = got.len() == exact.len() && norm.is_finite() && own.norm.is_finite();
    if !comparable || own.norm > norm || own.worst > worst {
        let why = format!(
            "it is {:.1e} from {dtype}, eager is {:.1e} (RMS), and its worst element {:.1e}, eager's {:.1e} (at most \
             {TIMES} times eager's)",
            own.norm, eager.norm, own.worst, eager.worst
        );
        let least = f64::MIN_POSITIVE;
        let excess = (own.norm / norm.max(least)).max(own.worst / worst.max(least));
        return Err(Further { why, excess });
    }
    Ok(Truth {
        dtype,
        artifact: own.norm,
        eager: eager.norm,
        artifact_worst: Some(own.worst),
        eager_worst: Some(eager.worst),
        size_alone: false,
    })
}

/// The rule in training. `eager` has the distance and the size of eager's value. The conditions do not hold for NaN.
fn judge_training(
    got: &[f64],
    exact: &[f64],
    (eager, eager_size): (f64, f64),
    (rtol, atol): (f64, f64),
) -> Result<Truth, Further> {
    let each = |of: fn(f64, f64) -> f64| root(got.iter().zip(exact).map(|(&got, &x)| of(got, x)));
    let (own_size, size) = (each(|got, _| got), each(|_, exact| exact));
    let artifact = each(|got, exact| got - exact);
    let beyond = (got.iter().zip(exact))
        .map(|(&got, &exact)| ((got - exact).abs() - (exact.abs() * rtol + atol)).max(0.0));
    let (beyond, limit) = (root(beyond), TIMES_OF_TRAINING * eager);
    let further = |why: String, excess: f64| Err(Further { why, excess });
    let comparable = got.len() == exact.len() && limit.is_finite() && artifact.is_finite();
    if !comparable || beyond > limit {
        let why = format!(
            "it is {artifact:.1e} from float64, eager is {eager:.1e} (RMS, at most {TIMES_OF_TRAINING} times eager's)"
        );
        return further(why, beyond / limit.max(f64::MIN_POSITIVE));
    }
    let size_alone = artifact > SHARE * size;
    let noise = limit > SHARE * size;
    let alike = own_size <= SIZES * eager_size && eager_size <= SIZES * own_size;
    if size_alone && !(noise && alike) {
        let why = format!(
            "it is {artifact:.1e} from float64, eager is {eager:.1e}; the value itself is {size:.1e} there, \
             {own_size:.1e} here and {eager_size:.1e} in eager (RMS)"
        );
        return further(why, artifact / size.max(f64::MIN_POSITIVE));
    }
    Ok(Truth {
        dtype: Dtype::Float64,
        artifact,
        eager,
        artifact_worst: None,
        eager_worst: None,
        size_alone,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value of 1,000 elements, and the same with errors that look random.
    fn value() -> Vec<f64> {
        (0..1000).map(|i| (f64::from(i) * 0.7).sin()).collect()
    }

    fn moved(by: f64) -> Vec<f64> {
        let error = |i: usize| by * 2.0_f64.sqrt() * (i as f64 * 1.3 + 0.4).sin();
        let moved = value().into_iter().enumerate();
        moved.map(|(i, x)| x + error(i)).collect()
    }

    fn tried(got: &[f64], eager: f64) -> Result<Truth, String> {
        judge_training(
            got,
            &value(),
            (eager, root(value().into_iter())),
            (1e-4, 1e-5),
        )
        .map_err(|further| further.why)
    }

    #[test]
    fn an_artifact_may_be_as_far_from_float64_as_eager() {
        let eager = 1e-2;
        let found = tried(&moved(2.5e-2), eager).unwrap();
        assert!((found.artifact - 2.5e-2).abs() < 1e-3);
        insta::assert_snapshot!(tried(&moved(4e-2), eager).unwrap_err(), @"it is 4.0e-2 from float64, eager is 1.0e-2 (RMS, at most 3 times eager's)");
        // The plain tolerance is beside it.
        assert!(tried(&moved(5e-6), 0.0).is_ok());
        assert!(tried(&moved(1e-3), 0.0).is_err());
        // One element counts as the norm does: far away it is refused.
        let mut one = value();
        one[3] += 0.6;
        assert!(tried(&one, eager).is_ok());
        one[3] += 0.6;
        assert!(tried(&one, eager).is_err());
    }

    #[test]
    fn a_wrong_value_is_refused_however_far_eager_is() {
        let scaled = |by: f64| value().iter().map(|x| x * by).collect::<Vec<_>>();
        let size = (value().iter().map(|x| x * x).sum::<f64>() / 1000.0).sqrt();
        for share in [0.0, 1e-4, 0.01, 0.3, 0.5, f64::NAN, f64::INFINITY] {
            let eager = share * size;
            for by in [0.0, -1.0, f64::NAN] {
                assert!(tried(&scaled(by), eager).is_err(), "{eager} {by}");
            }
        }
        assert!(tried(&scaled(1.05), 0.01 * size).is_err());
        assert!(tried(&scaled(1.05), 0.02 * size).is_ok());
        insta::assert_snapshot!(tried(&scaled(0.0), size).unwrap_err(), @"it is 7.1e-1 from float64, eager is 7.1e-1; the value itself is 7.1e-1 there, 0.0e0 here and 7.1e-1 in eager (RMS)");
        assert!(tried(&value()[1..], 1e-2).is_err());
    }

    #[test]
    fn where_eager_is_noise_a_value_has_to_be_as_large() {
        let noise = |by: f64| {
            (0..1000)
                .map(|i| by * (f64::from(i) * 1.3 + 0.4).sin())
                .collect::<Vec<_>>()
        };
        let accepted = tried(&noise(1.0), 1.3).unwrap();
        assert!(accepted.size_alone);
        assert!(!tried(&moved(2.5e-2), 1e-2).unwrap().size_alone);
        for by in [0.0, 0.4, 2.1, f64::NAN] {
            assert!(tried(&noise(by), 1.3).is_err(), "{by}");
        }
        // It is no noise where eager is near.
        assert!(tried(&noise(1.0), 0.2).is_err());
        // Zero but for rounding, as the gradient of a bias before a norm.
        let rounding = |own: f64| judge_training(&[own], &[0.0], (1e-9, 1e-9), (0.0, 0.0));
        assert!(rounding(1e-9).is_ok());
        assert!(rounding(0.0).is_ok() && rounding(4e-9).is_err());
    }

    #[test]
    fn without_gradients_norm_and_worst_element_count() {
        let tried = |got: &[f64], rounding: f64| {
            let eager = Distance {
                norm: 1e-2,
                worst: 3e-2,
            };
            judge(got, &value(), eager, rounding, Dtype::Float32).map_err(|further| further.why)
        };
        let found = tried(&moved(1.9e-2), 0.0).unwrap();
        assert!((found.artifact - 1.9e-2).abs() < 1e-3 && found.eager == 1e-2);
        insta::assert_snapshot!(tried(&moved(2.2e-2), 0.0).unwrap_err(), @"it is 2.2e-2 from float32, eager is 1.0e-2 (RMS), and its worst element 3.1e-2, eager's 3.0e-2 (at most 2 times eager's)");
        let mut one = value();
        one[3] += 0.05;
        assert!(tried(&one, 0.0).is_ok());
        one[3] += 0.05;
        assert!(tried(&one, 0.0).is_err());
        assert!(tried(&one[1..], 0.0).is_err());
        for by in [0.0, -1.0, 1.05, f64::NAN, f64::INFINITY] {
            let scaled: Vec<f64> = value().iter().map(|x| x * by).collect();
            assert!(tried(&scaled, 0.0).is_err(), "{by}");
        }
        // The truth, rounded once, where eager is exact by chance.
        let none = Distance {
            norm: 0.0,
            worst: 0.0,
        };
        let rounded: Vec<f64> = value()
            .iter()
            .map(|&x| f64::from(half::bf16::from_f64(x)))
            .collect();
        let rounding = rounding(Some(Dtype::Bfloat16));
        assert!(judge(&rounded, &value(), none, rounding, Dtype::Float32).is_ok());
        assert!(judge(&moved(4e-3), &value(), none, rounding, Dtype::Float32).is_err());
    }
}
