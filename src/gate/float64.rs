//! The float64 reference: what accepts a value of training that rounding alone moved too far from eager's.
//!
//! Some steps amplify rounding. A batch norm over few values divides by a small deviation, AdamW divides a tiny
//! gradient by its own size, autocast rounds to three digits. Then two right programs differ by more than any tolerance
//! that would notice a wrong one: between eager in float32 and a compiled ResNet-50 the norm of the gradients differs in
//! the third digit. The question is whether the artifact is further from the truth than eager is. So, where the plain
//! comparison of a step or of a half of a pair fails, the worker runs the same calls in double precision
//! (`worker/double.py`), and the candidate is compared once more. Nothing runs while the plain comparison passes.
//!
//! Each number below is the root of a mean square over the elements of a value. The limit is [`TIMES`] eager's distance
//! from float64. A float beyond its plain tolerance is accepted if both hold:
//!
//! | condition | why |
//! |---|---|
//! | what its elements differ from float64 beyond their plain tolerance is at most the limit | eager is as far from the truth |
//! | the limit is at most [`SHARE`] of the value itself | zeros in place of a value, and one with the other sign, are refused however far eager is; and a module that computes another function in float64 proves nothing |
//!
//! Eager's distance comes from several runs, because one number may be right by chance. Shapes, dtypes, integers, NaN
//! and infinity are never accepted so.
//!
//! Where float64 can't run, the plain refusal stands, with the reason. `verify --host` has no Python, and so no float64.

use std::collections::BTreeMap;

use precast_runtime::{Tensor, errors::TorchError};
use precast_store::record::{
    Dtype,
    receipt::{Compared, Float64},
};

/// The largest distance of an artifact, in distances of eager. Of the values beyond their plain tolerance in right steps
/// on a CPU, the furthest was at 1.1 (ResNet-18, float32), 1.3 (the same by autocast) and 2.4 (ResNet-50, float32: the
/// norm of the gradients, and 2.0 among tensors); half of them were below 1.
const TIMES: f64 = 3.0;

/// The largest limit, as a share of the value.
const SHARE: f64 = 0.9;

/// A value in float64, and eager's distance from it.
pub struct Exact {
    value: Tensor,
    eager: f64,
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
        let value = held.remove(&name);
        let eager = held.remove(&format!("eager.{name}"));
        let (Some(value), Some(eager)) = (value, eager) else {
            return Ok(None);
        };
        let eager = eager.to_vec::<f64>()?.first().copied();
        Ok(eager.map(|eager| Exact { value, eager }))
    };
    names.map(one).collect()
}

impl Exact {
    /// Accepts a value that is beyond its plain tolerances, which are in `row`, or says why not.
    pub fn judge(&self, got: &Tensor, row: Compared) -> Result<Compared, Further> {
        let failed = |error: TorchError| Further {
            why: format!("can't be compared with float64: {error}"),
            excess: f64::INFINITY,
        };
        let double = |tensor: &Tensor| tensor.to_dtype(Dtype::Float64)?.to_vec::<f64>();
        let got = double(got).map_err(failed)?;
        let exact = double(&self.value).map_err(failed)?;
        let tolerances = (row.rtol.unwrap_or(0.0), row.atol.unwrap_or(0.0));
        let distances = judge(&got, &exact, self.eager, tolerances)?;
        Ok(Compared {
            float64: Some(distances),
            ..row
        })
    }
}

/// The rule. The conditions do not hold for NaN.
fn judge(
    got: &[f64],
    exact: &[f64],
    eager: f64,
    (rtol, atol): (f64, f64),
) -> Result<Float64, Further> {
    let mean = |of: &dyn Fn(f64, f64) -> f64| {
        let squares = got.iter().zip(exact).map(|(&got, &exact)| of(got, exact));
        (squares.map(|x| x * x).sum::<f64>() / got.len().max(1) as f64).sqrt()
    };
    let size = mean(&|_, exact| exact);
    let artifact = mean(&|got, exact| got - exact);
    let beyond = mean(&|got, exact| ((got - exact).abs() - (exact.abs() * rtol + atol)).max(0.0));
    let limit = TIMES * eager;
    let decides = got.len() == exact.len() && limit <= SHARE * size;
    if decides && artifact.is_finite() && beyond <= limit {
        return Ok(Float64 { artifact, eager });
    }
    if decides {
        return Err(Further {
            why: format!(
                "it is {artifact:.1e} from float64, eager is {eager:.1e} (RMS, at most {TIMES} times eager's)"
            ),
            excess: beyond / limit.max(f64::MIN_POSITIVE),
        });
    }
    Err(Further {
        why: format!(
            "eager is {eager:.1e} from float64, too far to decide (the value is {size:.1e}, RMS)"
        ),
        // A value that is surely wrong is named before it.
        excess: 1.0,
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

    fn tried(got: &[f64], eager: f64) -> Result<Float64, String> {
        judge(got, &value(), eager, (1e-4, 1e-5)).map_err(|further| further.why)
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
        insta::assert_snapshot!(tried(&value(), 0.3).unwrap_err(), @"eager is 3.0e-1 from float64, too far to decide (the value is 7.1e-1, RMS)");
        assert!(tried(&value()[1..], 1e-2).is_err());
        // A value that is zero in float64 has no size.
        assert!(judge(&[1e-9], &[0.0], 1e-9, (0.0, 0.0)).is_err());
    }
}
