//! The float64 reference: what accepts a value of training that rounding alone moved too far from eager's.
//!
//! Some steps amplify rounding. A batch norm over few values divides by a small deviation, AdamW divides a tiny
//! gradient by its own size, autocast rounds to three digits. Then two right programs differ by more than any tolerance
//! that would notice a wrong one: between eager in float32 and a compiled ResNet-50 the norm of the gradients differs in
//! the third digit. The question is whether the artifact is further from the truth than eager is. So, where the plain
//! comparison of a step or of a half of a pair fails, the worker runs the same calls in double precision
//! (`worker/double.py`), and the candidate is compared once more. Nothing runs while the plain comparison passes.
//!
//! Each number below is the root of a mean square over the elements of a value. A float beyond its plain tolerance is
//! accepted if both hold:
//!
//! | condition | why |
//! |---|---|
//! | what its elements differ from float64 beyond their plain tolerance is at most [`TIMES`] eager's distance | eager is as far from the truth |
//! | it differs from float64 by at most [`SHARE`] of the value; or, where eager may too, it is as large as eager's value, within [`SIZES`] | zeros in place of a value, and one with the other sign, are refused; where eager itself is noise, no direction is known, and zeros are still refused |
//!
//! Noise is not rare: by autocast in bfloat16, eager's gradients of a ResNet-50 before its training are further from
//! float64 than zeros would be, and a value of the right size is all that can be asked of any program. The receipt says
//! of which values this is so.
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

/// The largest distance of a value that is no noise, as a share of it.
const SHARE: f64 = 0.9;

/// How many times larger or smaller than eager's a value may be that is noise in eager.
const SIZES: f64 = 2.0;

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
    /// Accepts a value that is beyond its plain tolerances from eager's, which are in `row`, or says why not.
    pub fn judge(&self, got: &Tensor, eager: &Tensor, row: Compared) -> Result<Compared, Further> {
        let failed = |error: TorchError| Further {
            why: format!("can't be compared with float64: {error}"),
            excess: f64::INFINITY,
        };
        let double = |tensor: &Tensor| tensor.to_dtype(Dtype::Float64)?.to_vec::<f64>();
        let size = root(double(eager).map_err(failed)?.into_iter());
        let got = double(got).map_err(failed)?;
        let exact = double(&self.value).map_err(failed)?;
        let tolerances = (row.rtol.unwrap_or(0.0), row.atol.unwrap_or(0.0));
        let distances = judge(&got, &exact, (self.eager, size), tolerances)?;
        Ok(Compared {
            float64: Some(distances),
            ..row
        })
    }
}

/// The root of the mean square.
fn root(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    (values.map(|x| x * x).sum::<f64>() / count as f64).sqrt()
}

/// The rule. `eager` has the distance and the size of eager's value. The conditions do not hold for NaN.
fn judge(
    got: &[f64],
    exact: &[f64],
    (eager, eager_size): (f64, f64),
    (rtol, atol): (f64, f64),
) -> Result<Float64, Further> {
    let each = |of: fn(f64, f64) -> f64| root(got.iter().zip(exact).map(|(&got, &x)| of(got, x)));
    let (own_size, size) = (each(|got, _| got), each(|_, exact| exact));
    let artifact = each(|got, exact| got - exact);
    let beyond = (got.iter().zip(exact))
        .map(|(&got, &exact)| ((got - exact).abs() - (exact.abs() * rtol + atol)).max(0.0));
    let (beyond, limit) = (root(beyond), TIMES * eager);
    let further = |why: String, excess: f64| Err(Further { why, excess });
    let comparable = got.len() == exact.len() && limit.is_finite() && artifact.is_finite();
    if !comparable || beyond > limit {
        let why = format!(
            "it is {artifact:.1e} from float64, eager is {eager:.1e} (RMS, at most {TIMES} times eager's)"
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
    Ok(Float64 {
        artifact,
        eager,
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

    fn tried(got: &[f64], eager: f64) -> Result<Float64, String> {
        judge(
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
        let rounding = |own: f64| judge(&[own], &[0.0], (1e-9, 1e-9), (0.0, 0.0));
        assert!(rounding(1e-9).is_ok());
        assert!(rounding(0.0).is_ok() && rounding(4e-9).is_err());
    }
}
