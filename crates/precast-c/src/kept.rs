//! Memory that C reads, and its owner.

use std::{
    any::Any,
    ffi::{CString, c_char},
};

/// Returns a text for C. It ends before a NUL.
pub fn text_of(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes: Vec<u8> = text.into();
    bytes.truncate(
        bytes
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(bytes.len()),
    );
    CString::new(bytes).unwrap_or_default()
}

/// Owns the memory behind the pointers of a structure for C. The addresses do not change while it lives.
#[derive(Default)]
pub struct Kept(Vec<Box<dyn Any>>);

impl Kept {
    /// Returns the address of the elements.
    pub fn array<T: 'static>(&mut self, elements: Vec<T>) -> *const T {
        let start = elements.as_ptr();
        self.0.push(Box::new(elements));
        start
    }

    /// Returns the address of a structure.
    pub fn one<T: 'static>(&mut self, structure: T) -> *const T {
        self.array(vec![structure])
    }

    /// Returns the address of a text.
    pub fn text(&mut self, text: &str) -> *const c_char {
        let text = text_of(text);
        let start = text.as_ptr();
        self.0.push(Box::new(text));
        start
    }
}
