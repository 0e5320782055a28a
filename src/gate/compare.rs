//! The checks of the gate: the comparison of one output with eager's.
//!
//! `compare` checks the shape, the dtype and the values of integers. `errors` checks NaN, infinity and the tolerance of
//! floats. They apply to outputs, and to states after the call where eager's are known, at the sizes of the bucket and
//! at smaller ones. A padded sample that fails does not refuse the program: its smaller dimensions become exact.
//!
//! Two right programs in half precision may choose different tokens: their logits differ in the last digits. So a
//! `Choice` that differs from eager's is accepted if the logits agree and no other logit lies clearly between the two.

use half::{bf16, f16};
use precast_builder::gate::tolerance;
use precast_runtime::{Element, Tensor, errors::TorchError};
use precast_store::record::{Dtype, Output, receipt::Compared};

/// Returns whether both have the same elements; a NaN is the same as another.
pub fn equal(a: &Tensor, b: &Tensor) -> Result<bool, TorchError> {
    fn same<T: Element + PartialEq>(a: &Tensor, b: &Tensor) -> Result<bool, TorchError> {
        let (a, b) = (a.to_vec::<T>()?, b.to_vec::<T>()?);
        // Only a NaN is not itself.
        #[expect(clippy::eq_op)]
        let nan = |x: T| x != x;
        let same = |(&a, &b): (&T, &T)| a == b || (nan(a) && nan(b));
        Ok(a.iter().zip(&b).all(same))
    }
    if a.shape() != b.shape() {
        return Ok(false);
    }
    match a.dtype() {
        Some(Dtype::Float64) => same::<f64>(a, b),
        Some(Dtype::Float32) => same::<f32>(a, b),
        Some(Dtype::Float16) => same::<f16>(a, b),
        Some(Dtype::Bfloat16) => same::<bf16>(a, b),
        Some(Dtype::Bool) => same::<bool>(a, b),
        _ => Ok(a.dtype() == b.dtype() && a.to_bytes()? == b.to_bytes()?),
    }
}

/// Returns the number of elements that differ, of tensors of one shape and dtype.
fn differing(a: &Tensor, b: &Tensor) -> Result<usize, TorchError> {
    let size = a.dtype().map_or(1, Dtype::size);
    let (a, b) = (a.to_bytes()?, b.to_bytes()?);
    let pairs = std::iter::zip(a.chunks(size), b.chunks(size));
    Ok(pairs.filter(|(a, b)| a != b).count())
}

/// The tolerances of a spec.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tolerances {
    pub rtol: Option<f64>,
    pub atol: Option<f64>,
    /// The coarsest dtype of the output's computation, if it differs from the output's own. It determines the
    /// tolerances if the spec has neither.
    pub compute_dtype: Option<Dtype>,
    /// The calls before, whose rounding is in the states of this one.
    pub calls_before: usize,
    /// For a value that the forward program of a pair saves for its backward program: one element of so many may differ
    /// if it is no float.
    pub saved: Option<usize>,
}

impl Tolerances {
    /// Returns whether they are those of half precision, and none that the spec says.
    fn of_half_precision(&self, dtype: Dtype) -> bool {
        self.rtol.is_none()
            && self.atol.is_none()
            && (dtype.is_half() || self.compute_dtype.is_some_and(Dtype::is_half))
    }
}

/// What the rounding of each earlier call adds to the tolerances of a dtype. A training step amplifies it: AdamW moves a
/// parameter whose gradient is zero but for rounding as far as any other.
const LATER: f64 = 10.0;

/// One element of so many may be beyond the tolerance of half precision, by as much again: the largest of many rounding
/// errors grows with their number. A wrong program is wrong in more elements, or further.
const ONE_OF: usize = 100_000;

/// One element of so many may differ in a saved value that is no float: the mask of an activation is the sign of a value,
/// and the indices of a pool are those of its largest one. Rounding turns them where the value is zero, or the second one
/// as large. A wrong program is wrong in more elements, and the gradients are compared as well.
pub const SAVED_ONE_OF: usize = 1_000;

/// The same in a program that computes in half precision: a fifth of the signs in the last layers of a ResNet-50 before its
/// training are others in bfloat16 than in float64 (`eager_by_autocast` in `training-cpu.json`). Of a wrong mask half are.
pub const SAVED_ONE_OF_IN_HALF: usize = 3;

/// Why an output is refused.
#[derive(Debug)]
pub struct Refused {
    pub why: String,
    /// The error, if it is that of floats beyond their tolerances and nothing else.
    pub beyond: Option<Box<Compared>>,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, beyond: None }
    }
}

impl From<&str> for Refused {
    fn from(why: &str) -> Self {
        why.to_owned().into()
    }
}

/// Returns the error of one output against eager's, or why it is too large.
pub fn compare(
    tolerances: Tolerances,
    output: &Output,
    got: &Tensor,
    eager: &Tensor,
) -> Result<Compared, Refused> {
    if got.shape() != eager.shape() || got.dtype() != eager.dtype() {
        return Err(format!(
            "is {} {:?}, eager's is {} {:?}",
            got.dtype_name(),
            got.shape(),
            eager.dtype_name(),
            eager.shape()
        )
        .into());
    }
    let name = output.name.clone();
    let failed = |error: TorchError| Refused::from(format!("can't be compared: {error}"));
    let dtype = output.layout.dtype;
    if !dtype.is_float() {
        let same = equal(got, eager).map_err(failed)?;
        let accepted = same
            || match tolerances.saved {
                Some(many) => differing(got, eager).map_err(failed)? <= got.numel() / many,
                None => false,
            };
        if !accepted {
            return Err("differs from eager's".into());
        }
        return Ok(Compared {
            name,
            equal: Some(same),
            ..Compared::default()
        });
    }
    let errors = match got.dtype() {
        Some(Dtype::Float64) => errors::<f64>(tolerances, dtype, got, eager, |x| x),
        Some(Dtype::Float32) => errors::<f32>(tolerances, dtype, got, eager, f64::from),
        Some(Dtype::Float16) => errors::<f16>(tolerances, dtype, got, eager, f64::from),
        Some(Dtype::Bfloat16) => errors::<bf16>(tolerances, dtype, got, eager, f64::from),
        _ => return Err(format!("is {}, no floating point", got.dtype_name()).into()),
    };
    match errors.map_err(failed)? {
        Ok(row) => Ok(Compared { name, ..row }),
        Err(Refused { why, beyond }) => Err(Refused {
            why,
            beyond: beyond.map(|row| Box::new(Compared { name, ..*row })),
        }),
    }
}

/// Compares floats of one type, each as the double that it is.
fn errors<T: Element>(
    tolerances: Tolerances,
    dtype: Dtype,
    got: &Tensor,
    eager: &Tensor,
    double: impl Fn(T) -> f64,
) -> Result<Result<Compared, Refused>, TorchError> {
    let (got, eager) = (got.to_vec::<T>()?, eager.to_vec::<T>()?);
    let pairs = || std::iter::zip(&got, &eager).map(|(&got, &eager)| (double(got), double(eager)));
    if pairs().any(|(got, eager)| eager.is_finite() && !got.is_finite()) {
        return Ok(Err("has NaN or infinity where eager has none".into()));
    }
    // A NaN of eager compares with nothing; an infinity is a value like others.
    if pairs().any(|(got, eager)| eager.is_infinite() && got != eager) {
        return Ok(Err("has another value where eager has infinity".into()));
    }
    let finite = || pairs().filter(|(_, eager)| eager.is_finite());
    let largest = finite().fold(0.0, |largest, (_, eager)| eager.abs().max(largest));
    let (rtol, atol) = limits(tolerances, dtype, largest);
    let least = f64::MIN_POSITIVE.max(atol);
    let (mut max_abs, mut max_rel) = (0.0_f64, 0.0_f64);
    let (mut beyond, mut far) = (0_usize, 0_usize);
    let (mut own, mut other, mut both) = (0.0, 0.0, 0.0);
    for (got, eager) in finite() {
        let error = (got - eager).abs();
        max_abs = max_abs.max(error);
        max_rel = max_rel.max(error / eager.abs().max(least));
        let limit = eager.abs() * rtol + atol;
        beyond += usize::from(error > limit);
        far += usize::from(error > 2.0 * limit);
        own += got * got;
        other += eager * eager;
        both += got * eager;
    }
    let norms = own.sqrt() * other.sqrt();
    let cosine = if norms > 0.0 { both / norms } else { 1.0 };
    let few = match tolerances.of_half_precision(dtype) {
        true => got.len() / ONE_OF,
        false => 0,
    };
    let row = Compared {
        max_abs: Some(max_abs),
        max_rel: Some(max_rel),
        cosine: Some(cosine),
        rtol: Some(rtol),
        atol: Some(atol),
        ..Compared::default()
    };
    if far > 0 || beyond > few {
        let why = format!(
            "differs from eager in {beyond} of {} elements (largest difference {max_abs:.3e}, rtol {rtol:.1e}, \
             atol {atol:.1e}, cosine {cosine:.6})",
            got.len()
        );
        let beyond = Some(Box::new(row));
        return Ok(Err(Refused { why, beyond }));
    }
    Ok(Ok(row))
}

fn limits(tolerances: Tolerances, dtype: Dtype, largest: f64) -> (f64, f64) {
    let own = tolerance(dtype);
    // A spec that sets one tolerance replaces the compute dtype's.
    let inner = match (tolerances.rtol, tolerances.atol) {
        (None, None) => tolerances.compute_dtype.map_or(own, tolerance),
        _ => own,
    };
    let later = LATER.powi(i32::try_from(tolerances.calls_before).unwrap_or(i32::MAX));
    let (rtol, atol) = (own.0.max(inner.0) * later, own.1.max(inner.1) * later);
    (
        tolerances.rtol.unwrap_or(rtol),
        tolerances.atol.unwrap_or(atol * largest.max(1e-30)),
    )
}

/// An integer that is chosen by scores, as a token by its logits, where an artifact chose another than eager.
#[derive(Debug)]
pub struct Choice {
    /// Eager's scores.
    scores: Vec<f64>,
    /// The scores of the artifact's choice and of eager's.
    got: f64,
    eager: f64,
    /// The largest difference of the artifact's scores.
    error: f64,
}

impl Choice {
    /// Returns the choices of a batch, by the last rows of its scores: one row for each; None for outputs that are no
    /// indices and scores.
    pub fn all(scores: &Tensor, got: &Tensor, eager: &Tensor, error: f64) -> Option<Vec<Self>> {
        scores.dtype().filter(|dtype| dtype.is_float())?;
        let width = usize::try_from(*scores.shape().last()?).ok()?;
        let values = scores.to_dtype(Dtype::Float64).ok()?.to_vec::<f64>().ok()?;
        let (got, eager) = (got.to_vec::<i64>().ok()?, eager.to_vec::<i64>().ok()?);
        let rows = values.chunks_exact(width.max(1));
        let first = rows.len().checked_sub(got.len())?;
        let choice = |(scores, (&got, &eager)): (&[f64], (&i64, &i64))| {
            let score = |token: i64| scores.get(usize::try_from(token).ok()?).copied();
            Some(Self {
                got: score(got)?,
                eager: score(eager)?,
                scores: scores.to_vec(),
                error,
            })
        };
        let pairs = got.iter().zip(&eager);
        rows.skip(first).zip(pairs).map(choice).collect()
    }

    /// Returns whether the artifact's choice has as high a score as eager's, within the difference.
    pub fn tied(&self) -> bool {
        self.eager - self.got <= 2.0 * self.error
    }

    /// Returns whether no other score lies clearly between the two: a random number at the border between two tokens
    /// chooses one or the other.
    pub fn near(&self) -> bool {
        let (low, high) = (self.got.min(self.eager), self.got.max(self.eager));
        let margin = 2.0 * self.error;
        !self
            .scores
            .iter()
            .any(|&score| score > low + margin && score < high - margin)
    }

    /// Returns the row of accepted choices.
    pub fn row(name: &str) -> Compared {
        Compared {
            name: name.to_owned(),
            equal: Some(false),
            ..Compared::default()
        }
    }
}

/// Returns the number in an integer tensor of one element.
pub fn single(tensor: &Tensor) -> Option<i64> {
    let values = tensor.to_vec::<i64>().ok()?;
    <[i64; 1]>::try_from(values).ok().map(|[value]| value)
}

/// Returns the last row of a tensor of floats.
pub fn last_row(tensor: &Tensor) -> Option<Vec<f64>> {
    tensor.dtype().filter(|dtype| dtype.is_float())?;
    let width = usize::try_from(*tensor.shape().last()?).ok()?;
    let values = tensor.to_dtype(Dtype::Float64).ok()?.to_vec::<f64>().ok()?;
    Some(values[values.len().checked_sub(width)?..].to_vec())
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

    fn torch() {
        let torch = std::env::var_os("LIBTORCH").map(std::path::PathBuf::from);
        precast_runtime::Runtime::libtorch(torch.as_deref(), false).unwrap();
    }

    const DEFAULT: Tolerances = Tolerances {
        rtol: None,
        atol: None,
        compute_dtype: None,
        saved: None,
        calls_before: 0,
    };

    /// Compares two vectors of this dtype.
    fn compared(
        dtype: Dtype,
        tolerances: Tolerances,
        got: &[f64],
        eager: &[f64],
    ) -> Result<Compared, String> {
        torch();
        let tensor = |values: &[f64]| {
            let doubles = Tensor::from_slice(values, &[values.len() as i64]).unwrap();
            doubles.to_dtype(dtype).unwrap()
        };
        let output = output(dtype, eager.len() as i64);
        let row = compare(tolerances, &output, &tensor(got), &tensor(eager));
        row.map_err(|refused| refused.why)
    }

    #[test]
    fn rounding_may_turn_an_element_of_a_saved_mask() {
        torch();
        let mask = |turned: usize| {
            let bits = (0..2_000).map(|at| (at % 3 == 0) != (at < turned));
            Tensor::from_slice(&bits.collect::<Vec<_>>(), &[2_000]).unwrap()
        };
        let compared = |saved, turned| {
            let tolerances = Tolerances { saved, ..DEFAULT };
            let output = output(Dtype::Bool, 2_000);
            let row = compare(tolerances, &output, &mask(turned), &mask(0));
            row.map(|row| row.equal).map_err(|refused| refused.why)
        };
        let (single, half) = (Some(SAVED_ONE_OF), Some(SAVED_ONE_OF_IN_HALF));
        assert_eq!(compared(single, 0), Ok(Some(true)));
        assert_eq!(compared(single, 2), Ok(Some(false)));
        assert_eq!(compared(half, 600), Ok(Some(false)));
        for (saved, turned) in [(single, 3), (half, 1_000), (None, 1)] {
            assert_eq!(compared(saved, turned).unwrap_err(), "differs from eager's");
        }
    }

    #[test]
    fn a_choice_is_near_where_no_score_lies_between() {
        torch();
        let scores = Tensor::from_slice(&[1.0_f32, 3.0, 2.99, 2.0], &[1, 4]).unwrap();
        let index = |at: i64| Tensor::from_slice(&[at], &[1]).unwrap();
        let chosen = |got, eager| Choice::all(&scores, &index(got), &index(eager), 0.01);
        let found = |got, eager| {
            let choices = chosen(got, eager)?;
            Some((choices[0].tied(), choices[0].near()))
        };
        assert_eq!(found(2, 1), Some((true, true)));
        assert_eq!(found(3, 2), Some((false, true)));
        // 3 is as near to 1 as 2 is, which lies within the difference of 1.
        assert_eq!(found(3, 1), Some((false, true)));
        assert_eq!(found(0, 1), Some((false, false)));
        assert_eq!(found(0, 3), Some((false, true)));
        assert_eq!(found(4, 1), None);
        assert_eq!(found(-1, 1), None);
        // Each row of a batch has a choice; a prompt has the last of its rows.
        let rows = [1.0_f32, 3.0, 2.99, 2.0, 9.0, 3.0, 2.0, 1.0];
        let scores = Tensor::from_slice(&rows, &[2, 4]).unwrap();
        let indices = |at: &[i64]| Tensor::from_slice(at, &[at.len() as i64]).unwrap();
        let near = |got: &[i64], eager: &[i64]| {
            let choices = Choice::all(&scores, &indices(got), &indices(eager), 0.01);
            choices.map(|all| all.iter().map(Choice::near).collect::<Vec<_>>())
        };
        assert_eq!(near(&[2, 0], &[1, 0]), Some(vec![true, true]));
        assert_eq!(near(&[2, 2], &[1, 0]), Some(vec![true, false]));
        assert_eq!(near(&[0], &[1]), Some(vec![true]));
        assert_eq!(near(&[0, 0, 0], &[0, 0, 0]), None);
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
            let at =
                |tolerances, by: f64| compared(dtype, tolerances, &[1.0 + by, -1.0], &[1.0, -1.0]);
            let row = at(DEFAULT, near).unwrap();
            assert!(row.max_abs.unwrap() > near / 2.0, "{row:?}");
            assert!(row.cosine.unwrap() > 0.99, "{row:?}");
            let off = at(DEFAULT, far).unwrap_err();
            assert!(off.starts_with("differs from eager in 1 of 2"), "{dtype}");
            let wide = Tolerances {
                rtol: Some(far * 2.0),
                ..DEFAULT
            };
            assert!(at(wide, far).is_ok());
            let strict = Tolerances {
                rtol: Some(0.0),
                atol: Some(0.0),
                compute_dtype: Some(Dtype::Bfloat16),
                calls_before: 1,
                ..DEFAULT
            };
            assert!(at(strict, near).is_err());
        }
        // A value that was rounded to bfloat16 keeps that error in any output dtype.
        let inside = Tolerances {
            compute_dtype: Some(Dtype::Bfloat16),
            ..DEFAULT
        };
        assert!(compared(Dtype::Float32, inside, &[1.03, -1.0], &[1.0, -1.0]).is_ok());
        assert!(compared(Dtype::Float32, inside, &[1.13, -1.0], &[1.0, -1.0]).is_err());
        // The rounding of earlier calls is in the states.
        let later = Tolerances {
            calls_before: 1,
            ..DEFAULT
        };
        assert!(compared(Dtype::Float32, later, &[1.0005, -1.0], &[1.0, -1.0]).is_ok());
        assert!(compared(Dtype::Float32, later, &[1.005, -1.0], &[1.0, -1.0]).is_err());
        // Of many elements in half precision few may be beyond, and none far.
        let mut many = vec![1.0; 300_000];
        let ones = many.clone();
        many[..3].fill(1.07);
        let tried = |dtype, many: &[f64]| compared(dtype, DEFAULT, many, &ones);
        assert!(tried(Dtype::Bfloat16, &many).is_ok());
        assert!(tried(Dtype::Float32, &many).is_err());
        many[3] = 1.07;
        assert!(tried(Dtype::Bfloat16, &many).is_err());
        many[..4].copy_from_slice(&[1.0, 1.0, 1.0, 1.13]);
        assert!(tried(Dtype::Bfloat16, &many).is_err());
        // If a spec sets one tolerance, the other one keeps its default.
        let one = Tolerances {
            rtol: Some(1e-4),
            ..inside
        };
        let zero = |got: f64| compared(Dtype::Float32, one, &[got, 1.0], &[0.0, 1.0]);
        assert!(zero(5e-3).is_err());
        assert!(zero(1e-6).is_ok());
        // The tolerance of a small element depends on the other elements of the output.
        let large = compared(Dtype::Float32, DEFAULT, &[1000.0, 2e-3], &[1000.0, 1e-3]);
        assert!(large.is_ok());
        let integers = |got| compared(Dtype::Int32, DEFAULT, &[3.0, got], &[3.0, 4.0]).is_ok();
        assert_eq!((integers(4.0), integers(5.0)), (true, false));
    }

    #[test]
    fn nan_and_infinity_only_where_eager_has_them() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let single = |got: &[f64], eager: &[f64]| compared(Dtype::Float32, DEFAULT, got, eager);
        let refusal = |got, eager| single(&[1.0, got], &[1.0, eager]).err().unwrap_or_default();
        for bad in [nan, inf, -inf] {
            assert_eq!(
                refusal(bad, 2.0),
                "has NaN or infinity where eager has none"
            );
        }
        for (got, eager) in [(nan, nan), (2.0, nan), (inf, inf), (-inf, -inf)] {
            assert_eq!(refusal(got, eager), "");
        }
        for other in [-inf, 2.0, nan] {
            assert_eq!(
                refusal(other, inf),
                "has another value where eager has infinity"
            );
        }
        let rest = single(&[5.0, inf], &[1.0, inf]);
        assert!(rest.is_err(), "the rest is compared as ever");
    }

    #[test]
    fn another_shape_or_dtype_is_no_answer_and_an_empty_one_is_equal() {
        let wrong = compared(Dtype::Float32, DEFAULT, &[1.0], &[1.0, 2.0]).unwrap_err();
        assert_eq!(wrong, "is float32 [1], eager's is float32 [2]");
        let row = compared(Dtype::Float32, DEFAULT, &[], &[]).unwrap();
        assert_eq!(row.max_abs, Some(0.0));
    }
}
