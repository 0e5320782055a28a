//! The layout of a safetensors file that is written tensor by tensor, where the crate `safetensors` writes whole files
//! only: weight sets can be larger than the memory.
//!
//! The header is the crate's, from its own types; spaces end it, which the format allows. Every tensor starts at a multiple
//! of its element's size, because larger elements come first. The data begins at a multiple of [`ALIGN`] bytes, and tensors
//! whose size is one are before the others, so that each of them starts at one too: products of a matrix have other last
//! bits at other addresses, and torch's own tensors start at such ones. The Python worker writes in the same order.

use std::collections::BTreeMap;

use safetensors::{
    Dtype, SafeTensorError,
    tensor::{Metadata, TensorInfo},
};
use serde::Serialize;

const ALIGN: usize = 64;

/// The bytes before the tensors of a file, and the tensors in their order.
#[derive(Debug)]
pub struct TensorLayout {
    /// The length of the header, and the header.
    pub head: Vec<u8>,
    /// The names of the tensors.
    pub order: Vec<String>,
}

/// The header. The crate's own texts are in no order.
#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__", skip_serializing_if = "Option::is_none")]
    texts: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    tensors: &'a Metadata,
}

impl TensorLayout {
    /// Returns the layout of a file with these tensors by name, and with texts in its header. Fails for sizes that no
    /// file can have.
    pub fn new(
        tensors: BTreeMap<String, (Dtype, Vec<usize>)>,
        texts: Option<BTreeMap<String, String>>,
    ) -> Result<Self, SafeTensorError> {
        let mut sized = Vec::new();
        for (name, (dtype, shape)) in tensors {
            let mut sizes = shape.iter();
            let elements = sizes.try_fold(1_usize, |elements, size| elements.checked_mul(*size));
            let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize()));
            let bytes = bits.ok_or(SafeTensorError::ValidationOverflow)? / 8;
            sized.push((name, dtype, shape, bytes));
        }
        // The crate's dtypes are in the order of their sizes. Stable: names stay in order.
        sized.sort_by_key(|(_, dtype, _, bytes)| {
            (!bytes.is_multiple_of(ALIGN), std::cmp::Reverse(*dtype))
        });
        let (mut infos, mut order, mut offset) = (Vec::new(), Vec::new(), 0_usize);
        for (name, dtype, shape, bytes) in sized {
            let end = offset.checked_add(bytes);
            let data_offsets = (offset, end.ok_or(SafeTensorError::ValidationOverflow)?);
            offset = data_offsets.1;
            let info = TensorInfo {
                dtype,
                shape,
                data_offsets,
            };
            order.push(name.clone());
            infos.push((name, info));
        }
        let tensors = &Metadata::new(None, infos)?;
        let mut text = serde_json::to_vec(&Header { texts, tensors })?;
        let length = (size_of::<u64>() + text.len()).next_multiple_of(ALIGN) - size_of::<u64>();
        text.resize(length, b' ');
        let mut head = (length as u64).to_le_bytes().to_vec();
        head.append(&mut text);
        Ok(Self { head, order })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use safetensors::SafeTensors;

    use super::*;

    const DTYPES: [Dtype; 10] = [
        Dtype::BOOL,
        Dtype::U8,
        Dtype::I8,
        Dtype::I16,
        Dtype::F16,
        Dtype::BF16,
        Dtype::I32,
        Dtype::F32,
        Dtype::F64,
        Dtype::I64,
    ];

    proptest! {
        #[test]
        fn every_tensor_is_aligned_and_the_crate_reads_it(
            sizes in prop::collection::btree_map("[a-zé\"]{1,4}", (0..10_usize, 0..9_usize, 1..33_usize), 0..9),
            text in prop::option::of("[a-z]{0,90}"),
        ) {
            let texts = text.map(|text| BTreeMap::from([("format".to_owned(), text)]));
            let tensors: BTreeMap<String, (Dtype, Vec<usize>)> = sizes
                .into_iter()
                .map(|(name, (dtype, rows, columns))| (name, (DTYPES[dtype], vec![rows, columns])))
                .collect();
            let layout = TensorLayout::new(tensors.clone(), texts.clone()).unwrap();
            let data = layout.order.iter().enumerate().flat_map(|(at, name)| {
                let (dtype, shape) = &tensors[name];
                vec![at as u8; shape[0] * shape[1] * dtype.bitsize() / 8]
            });
            let file: Vec<u8> = layout.head.iter().copied().chain(data).collect();

            let read = SafeTensors::deserialize(&file).unwrap();
            prop_assert_eq!(read.len(), tensors.len());
            for (at, name) in layout.order.iter().enumerate() {
                let view = read.tensor(name).unwrap();
                prop_assert_eq!((view.dtype(), view.shape()), (tensors[name].0, &tensors[name].1[..]));
                prop_assert!(view.data().iter().all(|&byte| byte == at as u8));
                let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
                prop_assert_eq!(start % (view.dtype().bitsize() / 8), 0, "{}", name);
                if view.data().len().is_multiple_of(ALIGN) {
                    prop_assert_eq!(start % ALIGN, 0, "{}", name);
                }
            }
            let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
            let held = metadata.metadata().clone().map(|texts| texts.into_iter().collect());
            prop_assert_eq!(held, texts);
        }
    }

    #[test]
    fn texts_are_in_order() {
        let texts = ["b", "a", "c"].map(|text| (text.to_owned(), text.to_owned()));
        let layout = TensorLayout::new(BTreeMap::new(), Some(texts.into())).unwrap();
        let text = str::from_utf8(&layout.head[8..]).unwrap();
        let expected = r#"{"__metadata__":{"a":"a","b":"b","c":"c"}}"#;
        assert_eq!(text.trim_end(), expected);
    }

    #[test]
    fn sizes_of_no_file_are_refused() {
        for shape in [vec![usize::MAX, 2], vec![usize::MAX]] {
            let tensors = BTreeMap::from([("a".to_owned(), (Dtype::F32, shape))]);
            assert!(TensorLayout::new(tensors, None).is_err());
        }
    }
}
