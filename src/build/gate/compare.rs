//! Whether an output is what eager's is, and how far it is from it.

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::{Candidate, tolerance};
use crate::record::{Dtype, Output};

/// Returns whether both have the same elements; a NaN is the same as another.
pub fn equal(a: &Tensor, b: &Tensor) -> bool {
    a.eq_tensor(b)
        .logical_or(&a.isnan().logical_and(&b.isnan()))
        .all()
        .int64_value(&[])
        == 1
}

/// Returns the error of one output against eager's, or why it is too large.
pub fn compare(
    candidate: &Candidate,
    output: &Output,
    got: &Tensor,
    eager: &Tensor,
) -> Result<Value, String> {
    if got.size() != eager.size() || got.kind() != eager.kind() {
        return Err(format!(
            "is {:?} {:?}, eager's is {:?} {:?}",
            got.kind(),
            got.size(),
            eager.kind(),
            eager.size()
        ));
    }
    if !output.layout.dtype.is_float() {
        return match equal(got, eager) {
            true => Ok(json!({ "name": output.name, "equal": true })),
            false => Err("differs from eager's".to_owned()),
        };
    }
    let (got, eager) = (got.to_kind(Kind::Double), eager.to_kind(Kind::Double));
    let finite = eager.isfinite();
    if got
        .isfinite()
        .logical_not()
        .logical_and(&finite)
        .any()
        .int64_value(&[])
        == 1
    {
        return Err("has NaN or infinity where eager has none".to_owned());
    }
    let zero = Tensor::zeros_like(&eager);
    let (got, eager) = (
        got.where_self(&finite, &zero),
        eager.where_self(&finite, &zero),
    );
    let number = |t: Tensor| {
        if t.numel() == 0 {
            0.0
        } else {
            t.double_value(&[])
        }
    };
    let largest = if eager.numel() == 0 {
        0.0
    } else {
        number(eager.abs().max())
    };
    let (rtol, atol) = limits(candidate, output.layout.dtype, largest);
    let error = (&got - &eager).abs();
    let max_abs = if error.numel() == 0 {
        0.0
    } else {
        number(error.max())
    };
    let relative = &error / eager.abs().clamp_min(f64::MIN_POSITIVE.max(atol));
    let max_rel = if error.numel() == 0 {
        0.0
    } else {
        number(relative.max())
    };
    let norms = number((&got * &got).sum(Kind::Double)).sqrt()
        * number((&eager * &eager).sum(Kind::Double)).sqrt();
    let cosine = if norms > 0.0 {
        number((&got * &eager).sum(Kind::Double)) / norms
    } else {
        1.0
    };
    let beyond = number(
        (&error - (eager.abs() * rtol + atol))
            .gt(0.0)
            .sum(Kind::Double),
    );
    if beyond > 0.0 {
        return Err(format!(
            "differs from eager in {beyond} of {} elements (largest difference {max_abs:.3e}, rtol {rtol:.1e}, \
             atol {atol:.1e}, cosine {cosine:.6})",
            error.numel()
        ));
    }
    Ok(json!({
        "name": output.name, "max_abs": max_abs, "max_rel": max_rel, "cosine": cosine, "rtol": rtol, "atol": atol,
    }))
}

fn limits(candidate: &Candidate, dtype: Dtype, largest: f64) -> (f64, f64) {
    let (rtol, atol) = tolerance(dtype);
    (
        candidate.rtol.unwrap_or(rtol),
        candidate.atol.unwrap_or(atol * largest.max(1e-30)),
    )
}
