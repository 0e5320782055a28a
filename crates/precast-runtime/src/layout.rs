//! Sizes and strides: the bytes of a tensor, the elements of a program, and whether two layouts are the same.

use precast_store::record::{Dtype, Program};

/// Returns the bytes of a tensor without gaps.
pub(super) fn bytes_of(shape: &[i64], dtype: Dtype) -> usize {
    let sizes = shape.iter().map(|&size| usize::try_from(size).unwrap_or(0));
    sizes.fold(dtype.size(), usize::saturating_mul)
}

/// Returns whether two strides address a tensor of this shape alike: axes of size 1 do not matter.
pub(super) fn same_strides(shape: &[i64], a: &[i64], b: &[i64]) -> bool {
    shape.contains(&0)
        || shape
            .iter()
            .zip(a)
            .zip(b)
            .all(|((&size, a), b)| size == 1 || a == b)
}

/// Returns the elements of all inputs of a program.
pub(super) fn volume(program: &Program) -> i64 {
    let elements = |shape: &[i64]| shape.iter().fold(1i64, |n, &size| n.saturating_mul(size));
    program
        .inputs
        .iter()
        .map(|input| elements(&input.layout.shape))
        .fold(0, i64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::contiguous;

    #[test]
    fn sizes_that_no_number_holds_overflow_nothing() {
        let absurd = [0, 1 << 62, 1 << 62];
        assert_eq!(contiguous(&absurd)[..], [i64::MAX, 1 << 62, 1]);
        assert_eq!(bytes_of(&absurd, Dtype::Float32), 0);
        assert_eq!(bytes_of(&absurd[1..], Dtype::Float32), usize::MAX);
        assert_eq!(contiguous(&[2, 0, 3])[..], [3, 3, 1]);
    }
}
