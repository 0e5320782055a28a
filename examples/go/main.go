// Loads the model of examples/double and calls it from several goroutines.
//
//	make lib
//	export PKG_CONFIG_PATH=$PWD/target/c/lib/pkgconfig LD_LIBRARY_PATH=$PWD/target/c/lib
//	cd examples/go && go run . ../../.venv/libtorch ../../artifacts
package main

// #cgo pkg-config: precast
// #include <precast.h>
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"os"
	"sync"
	"unsafe"
)

// Error is an error of the library.
type Error struct {
	Code          int
	Message, Hint string
}

func (e *Error) Error() string { return e.Message }

// take turns an error of the library into one of Go, and frees it.
func take(raw *C.precast_error) error {
	if raw == nil {
		return nil
	}
	defer C.precast_error_free(raw)
	return &Error{int(raw.code), C.GoString(raw.message), C.GoString(raw.hint)}
}

// Model is a loaded model. Any number of goroutines can call it.
type Model struct {
	runtime *C.precast_runtime
	model   *C.precast_model
}

// Load loads the newest release of a model.
func Load(libtorch, store, name string) (*Model, error) {
	cLibtorch, cStore, cName := C.CString(libtorch), C.CString(store), C.CString(name)
	defer C.free(unsafe.Pointer(cLibtorch))
	defer C.free(unsafe.Pointer(cStore))
	defer C.free(unsafe.Pointer(cName))
	if err := take(C.precast_libtorch(cLibtorch, 0)); err != nil {
		return nil, err
	}
	model := &Model{}
	if err := take(C.precast_runtime_open(cStore, nil, &model.runtime)); err != nil {
		return nil, err
	}
	if err := take(C.precast_model_load(model.runtime, cName, &model.model)); err != nil {
		model.Close()
		return nil, err
	}
	return model, nil
}

// Close frees the model. No goroutine may use it any more.
func (m *Model) Close() {
	C.precast_model_free(m.model)
	C.precast_runtime_free(m.runtime)
}

// Modules returns the names of the modules.
func (m *Model) Modules() []string {
	var names []string
	for i := C.size_t(0); ; i++ {
		module := C.precast_model_module(m.model, i)
		if module == nil {
			return names
		}
		names = append(names, C.GoString(module.name))
	}
}

// Run runs a module on one matrix of float32, and returns the first output.
func (m *Model) Run(module string, rows, cols int, data []float32) ([]float32, error) {
	cModule := C.CString(module)
	defer C.free(unsafe.Pointer(cModule))

	// The library must not see memory of Go that holds pointers, so the tensor is in memory of C.
	const word = C.size_t(unsafe.Sizeof(uintptr(0)))
	bytes := C.size_t(4 * len(data))
	memory := C.malloc(2*8 + word + C.sizeof_DLTensor + bytes)
	defer C.free(memory)
	shape := (*[2]C.int64_t)(memory)
	inputs := (**C.DLTensor)(unsafe.Add(memory, 2*8))
	tensor := (*C.DLTensor)(unsafe.Add(memory, 2*8+word))
	elements := unsafe.Add(memory, 2*8+word+C.sizeof_DLTensor)
	copy(unsafe.Slice((*float32)(elements), len(data)), data)
	*shape = [2]C.int64_t{C.int64_t(rows), C.int64_t(cols)}
	*inputs = tensor
	*tensor = C.DLTensor{
		data:   elements,
		device: C.DLDevice{device_type: C.kDLCPU},
		ndim:   2,
		dtype:  C.DLDataType{code: C.kDLFloat, bits: 32, lanes: 1},
		shape:  &shape[0],
	}

	var outputs *C.precast_outputs
	if err := take(C.precast_model_run(m.model, cModule, inputs, nil, 1, &outputs)); err != nil {
		return nil, err
	}
	defer C.precast_outputs_free(outputs)
	y := C.precast_outputs_tensor(outputs, 0)
	count := 1
	for _, size := range unsafe.Slice(y.shape, int(y.ndim)) {
		count *= int(size)
	}
	answer := make([]float32, count)
	err := take(C.precast_outputs_copy(outputs, 0, unsafe.Pointer(&answer[0]), C.size_t(4*count)))
	return answer, err
}

func run(libtorch, store string) error {
	model, err := Load(libtorch, store, "double")
	if err != nil {
		return err
	}
	defer model.Close()
	fmt.Println("modules:", model.Modules())

	data := make([]float32, 40)
	for i := range data {
		data[i] = float32(i) / 40
	}
	const callers = 8
	answers := make([][]float32, callers)
	failures := make([]error, callers)
	var done sync.WaitGroup
	for caller := 0; caller < callers; caller++ {
		done.Add(1)
		go func(caller int) {
			defer done.Done()
			answers[caller], failures[caller] = model.Run("forward", 5, 8, data)
		}(caller)
	}
	done.Wait()
	for caller, answer := range answers {
		if failures[caller] != nil {
			return failures[caller]
		}
		for i, value := range answer {
			if value != answers[0][i] {
				return fmt.Errorf("caller %d has another answer than caller 0", caller)
			}
		}
	}
	fmt.Printf("%d callers: %.4f\n", callers, answers[0][:4])

	if _, err = model.Run("forward", 5, 9, make([]float32, 45)); err == nil {
		return fmt.Errorf("a row of 9 was not refused")
	}
	fmt.Println("refused:", err)
	return nil
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: double LIBTORCH STORE")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
