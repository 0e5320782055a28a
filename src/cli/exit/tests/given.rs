//! Errors made from the names of their variants and fields.

use std::{error::Error, path::PathBuf, sync::Arc};

use precast_store::{
    Device, Digest,
    record::{Dtype, Sizes},
};

use crate::runtime::errors::TorchError;

/// Returns one error of each of these variants of an enum.
///
/// A field without a value has one of its own, from its name and its place, so that a message with two fields in the
/// wrong order is another one.
macro_rules! samples {
    ($of:ident { $($variant:ident $({ $($field:ident $(= $value:expr)?),* })?),* $(,)? }) => {
        vec![$({
            #[allow(unused_mut, unused_variables, reason = "a variant may have no field")]
            let mut places = 1..;
            $of::$variant $({
                $($field: $crate::cli::exit::tests::given::samples!(@ $field places $($value)?)),*
            })?
        }),*]
    };
    (@ $field:ident $places:ident) => {
        $crate::cli::exit::tests::given::Given::given(stringify!($field), $places.next().unwrap())
    };
    (@ $field:ident $places:ident $value:expr) => {
        $value
    };
}
pub(super) use samples;

/// A type of a field.
pub(super) trait Given {
    fn given(name: &'static str, place: u8) -> Self;
}

macro_rules! given {
    ($(($name:ident, $place:ident): $($of:ty),+ => $value:expr;)+) => {
        $($(impl Given for $of {
            fn given($name: &'static str, $place: u8) -> Self {
                $value
            }
        })+)+
    };
}

given! {
    (name, _place): &'static str => name;
    (name, _place): String, PathBuf, Arc<str>, Box<dyn Error + Send + Sync> => name.into();
    (name, _place): TorchError => TorchError::Refused(name.into());
    (name, _place): Digest => Self::of(name.as_bytes());
    (name, _place): Vec<String>, Arc<[String]> => [name.to_owned()].into();
    (name, place): Sizes => [(name.to_owned(), place.into())].into();
    (_name, place): u32, u64, i64, f64 => place.into();
    (_name, place): usize => place.into();
    (_name, place): Option<usize> => Some(place.into());
    (_name, place): Vec<usize>, Vec<i64> => [place.into()].into();
    (_name, _place): bool => false;
    (_name, place): Dtype => if place == 3 { Self::Int64 } else { Self::Float32 };
    (_name, place): Device => Self::Cuda(place.into());
    (_name, _place): std::io::Error => std::io::ErrorKind::NotFound.into();
}
