//! The C types of an artifact and of the shim, and the declaration of a library's functions.
//!
//! [`functions!`] declares the functions of one library as a table that is filled when the library is opened,
//! [`imports!`] also as Rust functions that call through it.

use std::ffi::{c_char, c_void};

/// An `AOTInductorModelContainerHandle`.
pub type RawContainer = *mut c_void;
/// An `AtenTensorHandle`: an `at::Tensor*`.
pub type RawTensor = *mut c_void;

pub type Create =
    unsafe extern "C" fn(*mut RawContainer, usize, *const c_char, *const c_char) -> i32;
pub type Delete = unsafe extern "C" fn(RawContainer) -> i32;
pub type Run = unsafe extern "C" fn(
    RawContainer,
    *mut RawTensor,
    usize,
    *mut RawTensor,
    usize,
    *mut c_void,
    *mut c_void,
) -> i32;
pub type CountOf = unsafe extern "C" fn(RawContainer, *mut usize) -> i32;
pub type Name = unsafe extern "C" fn(RawContainer, usize, *mut *const c_char) -> i32;
pub type Flag = unsafe extern "C" fn(RawContainer, usize, *mut bool) -> i32;
pub type DtypeOf = unsafe extern "C" fn(RawContainer, usize, *mut i32) -> i32;
pub type Size = unsafe extern "C" fn(RawContainer, usize, *mut usize) -> i32;
pub type FailedCheck = unsafe extern "C" fn() -> *const c_char;
pub type Bind = unsafe extern "C" fn(RawContainer, *const Pair, usize, bool, bool) -> i32;
/// Makes an object of an `at::TensorBase&`, which it borrows.
pub type RawWrap = unsafe extern "C" fn(*const c_void) -> *mut c_void;

/// An `AOTInductorConstantMapEntry`.
#[repr(C)]
pub struct Pair {
    pub name: *const c_char,
    pub tensor: RawTensor,
}

/// The metadata of a tensor. The pointers live as long as the tensor keeps its shape.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawMeta {
    pub sizes: *const i64,
    pub strides: *const i64,
    pub data: *mut u8,
    pub storage: *mut u8,
    pub storage_bytes: i64,
    pub rank: u32,
    pub device_index: i32,
    pub dtype: i8,
    pub device_type: i8,
    pub flags: u8,
}

/// A `precast::Fixed` of the shim.
#[repr(C)]
pub struct RawItem {
    pub kind: i32,
    pub integer: i64,
    pub number: f64,
    pub text: *const c_char,
}

/// A `PrecastGiven` of the shim.
#[repr(C)]
pub struct RawGiven {
    pub name: *const c_char,
    pub is_list: i32,
    pub items: *const RawItem,
    pub n: usize,
}

/// A `PrecastArgument` of the shim.
#[repr(C)]
pub struct RawArgument {
    pub name: *const c_char,
    pub kind: i32,
    pub ints: *const i64,
    pub n_ints: usize,
    pub floats: *const f64,
    pub n_floats: usize,
    pub text: *const c_char,
}

/// Declares functions of a library once: `Functions`, which has them as fields, and its `find`.
macro_rules! functions {
    ($($name:ident: $symbol:expr => $type:ty;)*) => {
        /// The functions; all of them are there.
        #[allow(non_snake_case, reason = "as the library calls them")]
        pub struct Functions { $(pub $name: $type,)* }

        impl Functions {
            pub fn find(library: &libloading::os::unix::Library) -> Result<Self, $crate::TorchError> {
                Ok(Self { $($name: {
                    // SAFETY: the function of this name has this type, in every supported version.
                    let found = unsafe { library.get::<$type>(concat!($symbol, "\0").as_bytes()) };
                    *found.map_err(|_| {
                        $crate::TorchError::loader(concat!("it has no function `", $symbol, "`"))
                    })?
                },)* })
            }
        }
    };
}
pub(super) use functions;

/// Declares [`functions!`], and for each a Rust function that calls it through `table`.
macro_rules! imports {
    ($table:path; $($(#[$meta:meta])* pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        $crate::ffi::abi::functions! {
            $($name: stringify!($name) => unsafe extern "C" fn($($type),*) $(-> $ret)?;)*
        }

        $($(#[$meta])*
        #[allow(
            clippy::too_many_arguments, dead_code, non_snake_case,
            reason = "as the library declares them; some are called through the table"
        )]
        pub unsafe fn $name($($arg: $type),*) $(-> $ret)? {
            // SAFETY: as the caller vouches.
            unsafe { ($table().$name)($($arg),*) }
        })*
    };
}
pub(super) use imports;
