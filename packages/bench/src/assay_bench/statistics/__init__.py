"""Tests over pairs of items: was it lost, was it kept, and how many items would it take to know?"""
