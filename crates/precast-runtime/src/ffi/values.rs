//! Whether the elements of a tensor in host memory lie within bounds: one pass that a compiler turns into vector
//! instructions, and a second one for the position of the first element outside, where there is one.

use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;

use super::Meta;

/// An element outside its bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Its index on each axis.
    pub position: Vec<i64>,
    pub value: i64,
}

/// The size and the stride of an axis, in elements.
type Axis = (usize, usize);

/// Returns the first element that is below `bounds[0]` or not below `bounds[1]`, in the order of the axes.
///
/// Looks at tensors in host memory with an integer dtype, whose metadata was checked: their storage covers every element
/// ([`Meta::room`]). Of other tensors nothing is known, and None is returned.
pub fn outside(meta: &Meta<'_>, bounds: [i64; 2]) -> Option<Outside> {
    if meta.device() != Some(Device::Cpu) {
        return None;
    }
    let address = meta.address();
    let axes: SmallVec<[Axis; 8]> = std::iter::zip(meta.sizes(), meta.strides())
        .map(|(&size, &stride)| {
            let (size, stride) = (usize::try_from(size).ok()?, usize::try_from(stride).ok()?);
            // All elements of an expanded axis are the first one, however many it says it has.
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
fn find<T: Copy + Into<i64>>(address: usize, axes: &[Axis], bounds: [i64; 2]) -> Option<Outside> {
    // The axis that moves fastest in memory comes last; neighbours that lie densely become one.
    let mut order: SmallVec<[Axis; 8]> = axes.iter().copied().filter(|&(n, _)| n > 1).collect();
    order.sort_by_key(|axis| std::cmp::Reverse(axis.1));
    let mut merged: SmallVec<[Axis; 8]> = SmallVec::new();
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
fn any<T: Copy + Into<i64>>(address: usize, axes: &[Axis], bounds: [i64; 2]) -> bool {
    match axes {
        [] => any::<T>(address, &[(1, 1)], bounds),
        // SAFETY: `outside` is given tensors whose storage covers what sizes and strides say, and which are aligned to
        // an element or copied before (`aligned` below); nobody may write to an input while a call reads it.
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

/// Returns the first value outside in the order of the axes, and notes where it is.
fn first<T: Copy + Into<i64>>(
    address: usize,
    axes: &[Axis],
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

/// One comparison: what is below the lower bound wraps to a number above every distance.
#[inline(always)]
fn is_outside(value: i64, [low, past]: [i64; 2]) -> bool {
    value.wrapping_sub(low).cast_unsigned() >= past.wrapping_sub(low).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    fn found(tensor: &Tensor, bounds: [i64; 2]) -> Option<(Vec<i64>, i64)> {
        outside(&Meta::of(tensor), bounds).map(|found| (found.position, found.value))
    }

    #[test]
    fn every_dtype_and_both_ends() {
        for kind in [Kind::Int64, Kind::Int, Kind::Int16, Kind::Int8, Kind::Uint8] {
            let ids = Tensor::arange(24, (kind, tch::Device::Cpu)).view([2, 3, 4]);
            assert_eq!(found(&ids, [0, 24]), None, "{kind:?}");
            assert_eq!(found(&ids, [0, 23]), Some((vec![1, 2, 3], 23)), "{kind:?}");
            assert_eq!(found(&ids, [1, 24]), Some((vec![0, 0, 0], 0)), "{kind:?}");
        }
        let ends = Tensor::from_slice(&[i64::MIN, -1, 0, i64::MAX]);
        assert_eq!(
            found(&ends, [i64::MIN, i64::MAX]),
            Some((vec![3], i64::MAX))
        );
        assert_eq!(found(&ends, [-1, i64::MAX]), Some((vec![0], i64::MIN)));
        assert_eq!(found(&ends.get(2), [0, 1]), None);
        assert_eq!(found(&ends.get(1), [0, 1]), Some((vec![], -1)));
        let empty = Tensor::zeros([0, 3], (Kind::Int64, tch::Device::Cpu));
        assert_eq!(found(&empty, [5, 6]), None);
        let floats = Tensor::ones([2], (Kind::Float, tch::Device::Cpu));
        assert_eq!(found(&floats, [5, 6]), None);
    }

    #[test]
    fn any_strides() {
        let ids = Tensor::arange(4 * 6 * 8, (Kind::Int64, tch::Device::Cpu)).view([4, 6, 8]);
        // Row by row the last element, and whatever lies in the gaps is nobody's.
        for view in [
            ids.permute([2, 0, 1]),
            ids.slice(1, 1, 6, 2),
            ids.slice(2, 0, 8, 3).transpose(0, 1),
            ids.narrow(0, 1, 2).slice(2, 1, 8, 2),
        ] {
            let flat: Vec<i64> = Vec::try_from(view.contiguous().view(-1)).unwrap();
            let largest = *flat.iter().max().unwrap();
            assert_eq!(found(&view, [0, largest + 1]), None);
            let (position, value) = found(&view, [0, largest]).unwrap();
            assert_eq!(value, largest);
            let at = position.iter().fold(view.shallow_clone(), |t, &i| t.get(i));
            assert_eq!(at.int64_value(&[]), largest);
            let least = *flat.iter().min().unwrap();
            assert_eq!(found(&view, [least, i64::MAX]), None);
            assert_eq!(found(&view, [least + 1, i64::MAX]).unwrap().1, least);
        }
    }

    #[test]
    fn an_expanded_axis_costs_one_look() {
        let row = Tensor::from_slice(&[3i64, 9]).view([1, 2]);
        let wide = row.expand([1 << 60, 2], false);
        assert_eq!(found(&wide, [0, 10]), None);
        assert_eq!(found(&wide, [0, 9]), Some((vec![0, 1], 9)));
    }
}
