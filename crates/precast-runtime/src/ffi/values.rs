//! A bounds check of the elements of a tensor in host memory: one pass that a compiler vectorises, and a second one for
//! the position of the first element outside, if there is one.

use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;

use super::{
    Handle, Meta,
    shim::{self, checked},
};
use crate::TorchError;

/// Writes the lowest and highest value of an integer tensor to `notes[at]` and `notes[at + 1]`, on its device, and
/// returns the tensor with its values clamped. One without elements is noted as `low`.
pub fn note_range(
    tensor: &Handle,
    notes: &Handle,
    at: usize,
    [low, high]: [i64; 2],
) -> Result<Handle, TorchError> {
    let mut clamped = std::ptr::null_mut();
    // SAFETY: two live tensors and a valid out pointer.
    checked(unsafe {
        shim::precast_note_range(
            tensor.raw(),
            notes.raw(),
            at as i64,
            low,
            high,
            &mut clamped,
        )
    })?;
    // SAFETY: a new tensor that is the caller's.
    unsafe { Handle::from_raw(clamped) }.ok_or_else(|| "libtorch made no tensor".into())
}

/// Writes outcomes to `notes` from `at` on, on their device: one number, or whether any element is not zero.
pub fn note_outcomes(outcomes: &[Handle], notes: &Handle, at: usize) -> Result<(), TorchError> {
    let raw: SmallVec<[_; 8]> = outcomes.iter().map(Handle::raw).collect();
    // SAFETY: live tensors.
    checked(unsafe { shim::precast_note_outcomes(raw.as_ptr(), raw.len(), notes.raw(), at as i64) })
}

/// An element outside its bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Its index on each axis.
    pub position: Vec<i64>,
    pub value: i64,
}

/// The size and the stride of an axis, in elements.
type Stepped = (usize, usize);

/// Returns the first element that is below `bounds[0]` or not below `bounds[1]`, in the order of the axes.
///
/// Checks tensors in host memory with an integer dtype, whose metadata was checked: their storage covers every element
/// ([`Meta::room`]). Returns none for other tensors, which it can't check.
pub fn outside(meta: &Meta<'_>, bounds: [i64; 2]) -> Option<Outside> {
    if meta.device() != Some(Device::Cpu) {
        return None;
    }
    let address = meta.address();
    let axes: SmallVec<[Stepped; 8]> = std::iter::zip(meta.sizes(), meta.strides())
        .map(|(&size, &stride)| {
            let (size, stride) = (usize::try_from(size).ok()?, usize::try_from(stride).ok()?);
            // All elements of an expanded axis are the first one, for every size.
            Some((if stride == 0 { size.min(1) } else { size }, stride))
        })
        .collect::<Option<_>>()?;
    if axes.iter().any(|&(size, _)| size == 0) {
        return None;
    }
    match meta.dtype()? {
        Dtype::Int64 => find::<i64>(address, &axes, bounds),
        Dtype::Int32 => find::<i32>(address, &axes, bounds),
        Dtype::Int16 => find::<i16>(address, &axes, bounds),
        Dtype::Int8 => find::<i8>(address, &axes, bounds),
        Dtype::Uint8 => find::<u8>(address, &axes, bounds),
        _ => None,
    }
}

/// `axes` are those of a checked tensor of `T` at `address`, none of them of size 0.
fn find<T: Copy + Into<i64>>(
    address: usize,
    axes: &[Stepped],
    bounds: [i64; 2],
) -> Option<Outside> {
    // The axis with the smallest stride is last. Dense neighbours are merged into one axis.
    let mut order: SmallVec<[Stepped; 8]> = axes.iter().copied().filter(|&(n, _)| n > 1).collect();
    order.sort_by_key(|axis| std::cmp::Reverse(axis.1));
    let mut merged: SmallVec<[Stepped; 8]> = SmallVec::new();
    for (size, stride) in order {
        match merged.last_mut() {
            Some(last) if last.1 == size * stride => *last = (last.0 * size, stride),
            _ => merged.push((size, stride)),
        }
    }
    if !any::<T>(address, &merged, bounds) {
        return None;
    }
    let mut position = vec![0; axes.len()];
    let value = first::<T>(address, axes, bounds, &mut position)?;
    Some(Outside { position, value })
}

/// Returns whether any element is outside. The last axis is the fastest one.
fn any<T: Copy + Into<i64>>(address: usize, axes: &[Stepped], bounds: [i64; 2]) -> bool {
    match axes {
        [] => any::<T>(address, &[(1, 1)], bounds),
        // SAFETY: the caller of `outside` passes tensors whose storage covers their sizes and strides, and which are
        // aligned to an element or copied before (`aligned` below); no code may write to an input while a call reads
        // it.
        &[(size, 1)] if aligned::<T>(address) => among(
            unsafe { std::slice::from_raw_parts(address as *const T, size) },
            bounds,
        ),
        &[(size, stride)] => (0..size).fold(false, |bad, i| {
            bad | is_outside(read::<T>(address, i * stride), bounds)
        }),
        [(size, stride), rest @ ..] => {
            (0..*size).any(|i| any::<T>(address + i * stride * size_of::<T>(), rest, bounds))
        }
    }
}

/// Returns whether any value is outside, without a branch between two of them.
fn among<T: Copy + Into<i64>>(values: &[T], bounds: [i64; 2]) -> bool {
    // Blocks, so that a long tensor with a bad start is not read to its end.
    values.chunks(4096).any(|block| {
        block
            .iter()
            .fold(false, |bad, &value| bad | is_outside(value.into(), bounds))
    })
}

/// Returns the first value outside in the order of the axes, and its position.
fn first<T: Copy + Into<i64>>(
    address: usize,
    axes: &[Stepped],
    bounds: [i64; 2],
    position: &mut [i64],
) -> Option<i64> {
    let (Some((&(size, stride), rest)), Some((at, inner))) =
        (axes.split_first(), position.split_first_mut())
    else {
        let value = read::<T>(address, 0);
        return is_outside(value, bounds).then_some(value);
    };
    (0..size).find_map(|i| {
        let found = first::<T>(address + i * stride * size_of::<T>(), rest, bounds, inner)?;
        *at = i as i64;
        Some(found)
    })
}

fn read<T: Copy + Into<i64>>(address: usize, element: usize) -> i64 {
    // SAFETY: as in `any`; the read needs no alignment.
    unsafe {
        (address as *const T)
            .wrapping_add(element)
            .read_unaligned()
            .into()
    }
}

fn aligned<T>(address: usize) -> bool {
    address.is_multiple_of(align_of::<T>())
}

/// One comparison: a value below the lower bound wraps to a number above every distance.
#[inline(always)]
fn is_outside(value: i64, [low, past]: [i64; 2]) -> bool {
    value.wrapping_sub(low).cast_unsigned() >= past.wrapping_sub(low).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(tensor: &Handle, bounds: [i64; 2]) -> Option<(Vec<i64>, i64)> {
        outside(&tensor.meta(), bounds).map(|found| (found.position, found.value))
    }

    fn ids(data: &[i64], shape: &[i64]) -> Handle {
        Handle::of(data, shape, Dtype::Int64).unwrap()
    }

    fn counted(shape: &[i64]) -> Handle {
        ids(&(0..shape.iter().product()).collect::<Vec<_>>(), shape)
    }

    #[test]
    fn every_dtype_and_both_ends() {
        for name in ["int64", "int32", "int16", "int8", "uint8"] {
            let dtype: Dtype = serde_json::from_value(name.into()).unwrap();
            let ids = Handle::empty(&[2, 3, 4], &[12, 4, 1], dtype, Device::Cpu).unwrap();
            ids.copy_from(&counted(&[2, 3, 4])).unwrap();
            assert_eq!(found(&ids, [0, 24]), None, "{dtype}");
            assert_eq!(found(&ids, [0, 23]), Some((vec![1, 2, 3], 23)), "{dtype}");
            assert_eq!(found(&ids, [1, 24]), Some((vec![0, 0, 0], 0)), "{dtype}");
        }
        let ends = ids(&[i64::MIN, -1, 0, i64::MAX], &[4]);
        let all = found(&ends, [i64::MIN, i64::MAX]);
        assert_eq!(all, Some((vec![3], i64::MAX)));
        assert_eq!(found(&ends, [-1, i64::MAX]), Some((vec![0], i64::MIN)));
        let one = |at: usize| ends.view(&[], &[], at * 8, Dtype::Int64).unwrap();
        assert_eq!(found(&one(2), [0, 1]), None);
        assert_eq!(found(&one(1), [0, 1]), Some((vec![], -1)));
        assert_eq!(found(&ids(&[], &[0, 3]), [5, 6]), None);
        let floats = Handle::of(&[1.0f32; 2], &[2], Dtype::Float32).unwrap();
        assert_eq!(found(&floats, [5, 6]), None);
    }

    #[test]
    fn any_strides() {
        let ids = counted(&[4, 6, 8]);
        // Row by row the last element; the gaps belong to no tensor.
        for (shape, stride, offset) in [
            ([8, 4, 6], [1, 48, 8], 0),
            ([4, 3, 8], [48, 16, 1], 8),
            ([6, 4, 3], [8, 48, 3], 0),
            ([2, 6, 4], [48, 8, 2], 49),
        ] {
            let view = ids.view(&shape, &stride, offset * 8, Dtype::Int64).unwrap();
            let flat: Vec<i64> = view.read().unwrap();
            let largest = *flat.iter().max().unwrap();
            assert_eq!(found(&view, [0, largest + 1]), None);
            let (position, value) = found(&view, [0, largest]).unwrap();
            assert_eq!(value, largest);
            let at = std::iter::zip(&position, stride).map(|(i, stride)| i * stride);
            let index = at.sum::<i64>() + offset as i64;
            assert_eq!(index, largest, "its index is its value");
            let least = *flat.iter().min().unwrap();
            assert_eq!(found(&view, [least, i64::MAX]), None);
            assert_eq!(found(&view, [least + 1, i64::MAX]).unwrap().1, least);
        }
    }

    #[test]
    fn an_expanded_axis_costs_one_look() {
        let row = ids(&[3, 9], &[1, 2]);
        let wide = row.view(&[1 << 60, 2], &[0, 1], 0, Dtype::Int64).unwrap();
        assert_eq!(found(&wide, [0, 10]), None);
        assert_eq!(found(&wide, [0, 9]), Some((vec![0, 1], 9)));
    }
}
