//! Whether an output is what eager's is, and how far it is from it.

use precast_builder::gate::tolerance;
use precast_store::record::{Dtype, Output, receipt::Compared};
use tch::{Kind, Tensor};

/// Returns whether both have the same elements; a NaN is the same as another.
pub fn equal(a: &Tensor, b: &Tensor) -> bool {
    a.eq_tensor(b)
        .logical_or(&a.isnan().logical_and(&b.isnan()))
        .all()
        .int64_value(&[])
        == 1
}

/// What a spec says of tolerances.
#[derive(Clone, Copy, Debug, Default)]
pub struct Said {
    pub rtol: Option<f64>,
    pub atol: Option<f64>,
    /// The coarsest dtype that the output was computed in, where that is not its own; it counts where the spec says
    /// neither tolerance.
    pub computed_in: Option<Dtype>,
}

/// Returns the error of one output against eager's, or why it is too large.
pub fn compare(
    said: Said,
    output: &Output,
    got: &Tensor,
    eager: &Tensor,
) -> Result<Compared, String> {
    if got.size() != eager.size() || got.kind() != eager.kind() {
        return Err(format!(
            "is {:?} {:?}, eager's is {:?} {:?}",
            got.kind(),
            got.size(),
            eager.kind(),
            eager.size()
        ));
    }
    let name = output.name.clone();
    if !output.layout.dtype.is_float() {
        return match equal(got, eager) {
            true => Ok(Compared {
                name,
                equal: Some(true),
                ..Compared::default()
            }),
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
    // What eager can't say (NaN) compares with nothing; an infinity is a value as others are.
    let infinite = eager.isinf();
    if got
        .ne_tensor(&eager)
        .logical_and(&infinite)
        .any()
        .int64_value(&[])
        == 1
    {
        return Err("has another value where eager has infinity".to_owned());
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
    let (rtol, atol) = limits(said, output.layout.dtype, largest);
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
    Ok(Compared {
        name,
        max_abs: Some(max_abs),
        max_rel: Some(max_rel),
        cosine: Some(cosine),
        rtol: Some(rtol),
        atol: Some(atol),
        ..Compared::default()
    })
}

fn limits(said: Said, dtype: Dtype, largest: f64) -> (f64, f64) {
    let own = tolerance(dtype);
    // What a spec says of one is said of how near both must be.
    let inner = match (said.rtol, said.atol) {
        (None, None) => said.computed_in.map_or(own, tolerance),
        _ => own,
    };
    let (rtol, atol) = (own.0.max(inner.0), own.1.max(inner.1));
    (
        said.rtol.unwrap_or(rtol),
        said.atol.unwrap_or(atol * largest.max(1e-30)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::record::Layout;

    fn output(dtype: Dtype, size: i64) -> Output {
        Output {
            name: "y".into(),
            layout: Layout {
                dtype,
                shape: vec![size],
                stride: vec![1],
            },
            dims: vec![None],
        }
    }

    /// Compares two vectors of this dtype.
    fn compared(dtype: Dtype, said: Said, got: &[f64], eager: &[f64]) -> Result<Compared, String> {
        let kind = match dtype {
            Dtype::Float64 => Kind::Double,
            Dtype::Float16 => Kind::Half,
            Dtype::Bfloat16 => Kind::BFloat16,
            Dtype::Int32 => Kind::Int,
            _ => Kind::Float,
        };
        let tensor = |values: &[f64]| Tensor::from_slice(values).to_kind(kind);
        let output = output(dtype, eager.len() as i64);
        compare(said, &output, &tensor(got), &tensor(eager))
    }

    #[test]
    fn tolerances_follow_the_dtype_unless_the_spec_says_them() {
        let tried = [
            (Dtype::Float64, 5e-8, 3e-7),
            (Dtype::Float32, 5e-5, 3e-4),
            (Dtype::Float16, 8e-3, 3e-2),
            (Dtype::Bfloat16, 3e-2, 1.3e-1),
        ];
        for (dtype, near, far) in tried {
            let row = compared(dtype, Said::default(), &[1.0 + near, -1.0], &[1.0, -1.0]).unwrap();
            assert!(row.max_abs.unwrap() > near / 2.0, "{row:?}");
            assert!(row.cosine.unwrap() > 0.99, "{row:?}");
            let off = compared(dtype, Said::default(), &[1.0 + far, -1.0], &[1.0, -1.0]);
            assert!(
                off.unwrap_err().starts_with("differs from eager in 1 of 2"),
                "{dtype}"
            );
            let said = Said {
                rtol: Some(far * 2.0),
                ..Said::default()
            };
            assert!(compared(dtype, said, &[1.0 + far, -1.0], &[1.0, -1.0]).is_ok());
            let strict = Said {
                rtol: Some(0.0),
                atol: Some(0.0),
                computed_in: Some(Dtype::Bfloat16),
            };
            assert!(compared(dtype, strict, &[1.0 + near, -1.0], &[1.0, -1.0]).is_err());
        }
        // What was rounded on the way is no nearer than that, whatever it is given back as.
        let inside = Said {
            computed_in: Some(Dtype::Bfloat16),
            ..Said::default()
        };
        assert!(compared(Dtype::Float32, inside, &[1.03, -1.0], &[1.0, -1.0]).is_ok());
        assert!(compared(Dtype::Float32, inside, &[1.13, -1.0], &[1.0, -1.0]).is_err());
        // A spec that says one of the two leaves the other where it is without it.
        let one = Said {
            rtol: Some(1e-4),
            ..inside
        };
        let zero = |got: f64| compared(Dtype::Float32, one, &[got, 1.0], &[0.0, 1.0]);
        assert!(zero(5e-3).is_err());
        assert!(zero(1e-6).is_ok());
        // The tolerance of a small element follows the rest of the output.
        let large = [1000.0, 1e-3];
        assert!(compared(Dtype::Float32, Said::default(), &[1000.0, 2e-3], &large).is_ok());
        assert!(compared(Dtype::Int32, Said::default(), &[3.0, 4.0], &[3.0, 4.0]).is_ok());
        assert!(compared(Dtype::Int32, Said::default(), &[3.0, 5.0], &[3.0, 4.0]).is_err());
    }

    #[test]
    fn nan_and_infinity_only_where_eager_has_them() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let told = |got: f64, eager: f64| {
            let refused = compared(Dtype::Float32, Said::default(), &[1.0, got], &[1.0, eager]);
            refused.err().unwrap_or_default()
        };
        for bad in [nan, inf, -inf] {
            assert_eq!(told(bad, 2.0), "has NaN or infinity where eager has none");
        }
        assert_eq!(
            (told(nan, nan), told(2.0, nan)),
            (String::new(), String::new())
        );
        assert_eq!(
            (told(inf, inf), told(-inf, -inf)),
            (String::new(), String::new())
        );
        for other in [-inf, 2.0, nan] {
            assert_eq!(
                told(other, inf),
                "has another value where eager has infinity"
            );
        }
        let rest = compared(Dtype::Float32, Said::default(), &[5.0, inf], &[1.0, inf]);
        assert!(rest.is_err(), "the rest is compared as ever");
    }

    #[test]
    fn another_shape_or_dtype_is_no_answer_and_an_empty_one_is_equal() {
        let wrong = compared(Dtype::Float32, Said::default(), &[1.0], &[1.0, 2.0]).unwrap_err();
        assert_eq!(wrong, "is Float [1], eager's is Float [2]");
        let row = compared(Dtype::Float32, Said::default(), &[], &[]).unwrap();
        assert_eq!(row.max_abs, Some(0.0));
    }
}
